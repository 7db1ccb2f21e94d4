//! Arguments that select a partition.

use clap::Args;
use firstlight_fabric_api::v1 as api;
use firstlight_pci::Address;

/// Exactly one selector.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct SelectorArgs {
    /// The partition with this id.
    partition: Option<u32>,
    /// Any partition with this number of GPUs.
    #[arg(long, value_name = "COUNT")]
    gpus: Option<u32>,
    /// The partition of exactly these GPUs, by module id: 1,3.
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    module_ids: Option<Vec<u32>>,
    /// The partition of exactly the GPUs at these addresses, by the module map: 0000:0f:00.0,0000:10:00.0.
    #[arg(long, value_name = "ADDRESSES", value_delimiter = ',')]
    pci: Option<Vec<Address>>,
}

impl SelectorArgs {
    /// Converts the arguments to the API.
    pub(crate) fn partition_request(&self) -> api::PartitionRequest {
        use api::partition_request::Selector;
        let modules = || self.module_ids.clone().map(|ids| Selector::Gpus(api::Gpus { ids }));
        let places = |places: &Vec<Address>| places.iter().map(ToString::to_string).collect();
        let pci = || self.pci.as_ref().map(|all| Selector::Pci(api::PciAddresses { addresses: places(all) }));
        let selector =
            self.partition.map(Selector::Partition).or(self.gpus.map(Selector::Count)).or_else(modules).or_else(pci);
        api::PartitionRequest { selector }
    }
}

/// Parses `PARTITION=OWNER`.
pub(crate) fn desired(text: &str) -> Result<api::DesiredPartition, String> {
    let wrong = || format!("{text:?} is not PARTITION=OWNER, such as 3=vm-17");
    let (partition, owner) = text.split_once('=').ok_or_else(wrong)?;
    let partition = partition.parse().map_err(|_| wrong())?;
    if owner.is_empty() { Err(wrong()) } else { Ok(api::DesiredPartition { partition, owner: owner.to_owned() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn desired_partition_is_partition_and_owner() {
        assert_eq!(desired("3=a=b").unwrap(), api::DesiredPartition { partition: 3, owner: "a=b".to_owned() });
        for wrong in ["3", "=a", "x=a", "3=", "-1=a", "4294967296=a"] {
            assert!(desired(wrong).unwrap_err().contains("PARTITION=OWNER"), "{wrong}");
        }
    }
}
