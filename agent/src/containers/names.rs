//! Names of containers in their pod.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Annotations that hold a container's name in its pod.
const NAMES: &[&str] =
    &["io.kubernetes.cri.container-name", "io.kubernetes.container.name", "io.kubernetes.cri-o.ContainerName"];

/// Container names in the pod, by container id.
#[derive(Debug, Default)]
pub(super) struct ContainerNames(Mutex<BTreeMap<String, String>>);

impl ContainerNames {
    fn all(&self) -> MutexGuard<'_, BTreeMap<String, String>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a container's name: that of its annotations, or its id.
    pub(super) fn add(&self, container: &str, annotations: &HashMap<String, String>) {
        let name = NAMES.iter().find_map(|name| annotations.get(*name));
        self.all().insert(container.to_owned(), name.map_or(container, String::as_str).to_owned());
    }

    /// Removes a container.
    pub(super) fn forget(&self, container: &str) {
        self.all().remove(container);
    }

    /// Returns the id of the container with this name or id.
    pub(super) fn find(&self, name: &str) -> Option<String> {
        let all = self.all();
        let found = all.iter().find(|(_, known)| *known == name).map(|(container, _)| container.clone());
        found.or_else(|| all.contains_key(name).then(|| name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn containers_are_found_by_name_and_id() {
        let names = ContainerNames::default();
        names.add("c1", &HashMap::from([(NAMES[0].to_owned(), "web".to_owned())]));
        names.add("c2", &HashMap::new());
        assert_eq!((names.find("web"), names.find("c2")), (Some("c1".into()), Some("c2".into())));
        assert_eq!(names.find("c1"), Some("c1".into()));
        names.forget("c1");
        assert_eq!(names.find("web"), None);
    }
}
