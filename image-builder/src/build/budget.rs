//! What an image may weigh, and what is heavy in one that weighs more.

use crate::manifest::Budget;
use crate::progress::megabytes;
use crate::record::Contents;

/// How many files are named.
const NAMED: usize = 5;

/// What is over the budget, in one line; `packed` is the size of the file with the root.
pub(super) fn exceeded(budget: Budget, packed: u64, contents: &Contents) -> Option<String> {
    let over = |key: &str, what: &str, bytes: u64, most: Option<u64>| {
        let most = most.filter(|most| bytes > *most)?;
        Some(format!("{what} {bytes} bytes, and budget.{key} allows {most}"))
    };
    let said: Vec<String> = [
        over("image", "its file has", packed, budget.image),
        over("files", "the files in it have", contents.file_bytes, budget.files),
    ]
    .into_iter()
    .flatten()
    .collect();
    if said.is_empty() {
        return None;
    }
    let mut files: Vec<(u64, &str)> = contents.files.iter().map(|(path, file)| (file.size, path.as_str())).collect();
    files.sort_by(|a, b| b.cmp(a));
    let largest: Vec<String> =
        files.iter().take(NAMED).map(|(size, path)| format!("/{path} {}", megabytes(*size))).collect();
    Some(format!("{}; the largest: {}; leave something out, or raise the budget", said.join("; "), largest.join(", ")))
}
