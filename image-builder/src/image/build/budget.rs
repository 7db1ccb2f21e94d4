//! Size limits of an image.

use firstlight_image::ImageRecord;
use firstlight_progress::megabytes;

use crate::image::manifest::Budget;

/// Number of largest files in the error.
const LISTED_FILES: usize = 5;

/// Describes the exceeded limits in one line; `packed` is the size of the root file system image.
pub(super) fn exceeded(budget: Budget, packed: u64, contents: &ImageRecord) -> Option<String> {
    let over = |key: &str, what: &str, bytes: u64, limit: Option<u64>| {
        let limit = limit.filter(|limit| bytes > *limit)?;
        Some(format!("{what} {bytes} bytes, but budget.{key} allows {limit}"))
    };
    let exceeded: Vec<String> = [
        over("image", "its root file system image has", packed, budget.image),
        over("files", "its files have", contents.file_bytes, budget.files),
    ]
    .into_iter()
    .flatten()
    .collect();
    if exceeded.is_empty() {
        return None;
    }
    let mut files: Vec<(u64, &str)> = contents.files.iter().map(|(path, file)| (file.size, path.as_str())).collect();
    files.sort_by(|a, b| b.cmp(a));
    let largest: Vec<String> =
        files.iter().take(LISTED_FILES).map(|(size, path)| format!("/{path} {}", megabytes(*size))).collect();
    Some(format!("{}; the largest: {}; remove files or raise the budget", exceeded.join("; "), largest.join(", ")))
}
