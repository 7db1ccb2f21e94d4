//! What somebody wants, as it is typed.

use clap::Args;
use firstlight_fabric_api::v1 as api;
use firstlight_pci::Address;

/// One of these.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub(crate) struct AskArgs {
    /// This partition.
    partition: Option<u32>,
    /// So many GPUs, whichever.
    #[arg(long, value_name = "COUNT")]
    gpus: Option<u32>,
    /// Exactly these GPUs, by module id: 1,3.
    #[arg(long, value_name = "IDS", value_delimiter = ',')]
    modules: Option<Vec<u32>>,
    /// Exactly those at these places, by the module map: 0000:0f:00.0,0000:10:00.0.
    #[arg(long, value_name = "ADDRESSES", value_delimiter = ',')]
    pci: Option<Vec<Address>>,
}

impl AskArgs {
    /// In the API's words.
    pub(crate) fn ask(&self) -> api::Ask {
        use api::ask::What;
        let modules = || self.modules.clone().map(|ids| What::Gpus(api::Gpus { ids }));
        let places = |places: &Vec<Address>| places.iter().map(ToString::to_string).collect();
        let pci = || self.pci.as_ref().map(|all| What::Pci(api::PciAddresses { addresses: places(all) }));
        let what = self.partition.map(What::Partition).or(self.gpus.map(What::Count)).or_else(modules).or_else(pci);
        api::Ask { what }
    }
}

/// `PARTITION=OWNER`.
pub(crate) fn wanted(text: &str) -> Result<api::Wanted, String> {
    let wrong = || format!("{text:?} is not PARTITION=OWNER, such as 3=vm-17");
    let (partition, owner) = text.split_once('=').ok_or_else(wrong)?;
    let partition = partition.parse().map_err(|_| wrong())?;
    if owner.is_empty() { Err(wrong()) } else { Ok(api::Wanted { partition, owner: owner.to_owned() }) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_to_be_is_a_partition_and_whose_it_is() {
        assert_eq!(wanted("3=a=b").unwrap(), api::Wanted { partition: 3, owner: "a=b".to_owned() });
        for wrong in ["3", "=a", "x=a", "3=", "-1=a", "4294967296=a"] {
            assert!(wanted(wrong).unwrap_err().contains("PARTITION=OWNER"), "{wrong}");
        }
    }
}
