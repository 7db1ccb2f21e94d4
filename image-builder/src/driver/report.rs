//! Formats the tables of drivers, kernels and profiles as Markdown.

use super::matrix::Table;
use super::profile::{Catalogue, Group};

/// Returns cells and patches as Markdown.
#[must_use]
pub fn cells(table: &Table) -> String {
    let rows = table.rows().into_iter().map(|row| {
        let result = match &row.why {
            Some(why) => format!("no: {why}"),
            None if row.patches.is_empty() => "yes".to_owned(),
            None => format!("yes, with {}", row.patches.join(", ")),
        };
        [row.driver, row.driver_suite, row.kernel, row.kernel_suite, result]
    });
    let mut text = markdown(["driver", "from", "kernel", "from", "compiles"], rows);
    if !table.patches.is_empty() {
        let ranges = |ranges: &[super::version::Range]| {
            ranges.iter().map(|range| format!("`{range}`")).collect::<Vec<_>>().join(" or ")
        };
        let rows = table.patches.iter().map(|patch| {
            let reason = patch.reason.trim().to_owned();
            [patch.name.clone(), ranges(&patch.drivers), ranges(&patch.kernels), format!("`{}`", patch.file), reason]
        });
        text.push('\n');
        text.push_str(&markdown(["patch", "drivers", "kernels", "edits", "reason"], rows));
    }
    text
}

/// Returns profiles, groups and generations as Markdown.
#[must_use]
pub fn profiles(catalogue: &Catalogue) -> String {
    let rows = catalogue.profiles.iter().map(|profile| {
        [profile.name.clone(), profile.about.clone(), profile.groups.join(", "), profile.gpus.join(", ")]
    });
    let profiles = markdown(["profile", "for", "groups", "GPUs"], rows);
    let rows =
        catalogue.groups.iter().map(|group| [group.name.clone(), group.reason.clone(), files(group), packages(group)]);
    let groups = markdown(["group", "why", "files", "packages"], rows);
    let rows = catalogue.generations.iter().map(|one| {
        let since = one.since.as_ref().map_or_else(String::new, ToString::to_string);
        [one.name.clone(), one.chips.clone(), format!("`{}`", one.firmware), since]
    });
    let generations = markdown(["GPUs", "chips", "firmware", "since driver"], rows);
    format!("{profiles}\n{groups}\n{generations}")
}

fn files(group: &Group) -> String {
    let name = |path: &str| path.rsplit('/').next().unwrap_or(path).trim_end_matches(".{version}").to_owned();
    let mut names: Vec<String> = group
        .files
        .iter()
        .map(|file| name(file.to.as_ref().unwrap_or(&file.from)).replace("{gsp}", "gsp_*.bin"))
        .map(|name| format!("`{name}`"))
        .collect();
    names.dedup();
    names.join(" ")
}

fn packages(group: &Group) -> String {
    let mut names: Vec<&str> = group.files.iter().map(|file| file.package[0].as_str()).collect();
    names.dedup();
    names.join(", ")
}

fn markdown<const N: usize>(head: [&str; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let mut text = line(&head.map(str::to_owned));
    text.push_str(&format!("{}|\n", "|---".repeat(N)));
    for row in rows {
        // An unescaped bar would begin another cell.
        text.push_str(&line(&row.map(|cell| cell.replace('|', "\\|").replace('\n', " "))));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_and_patch_is_in_the_table() {
        let table = Table::own().unwrap();
        let text = cells(&table);
        for cell in &table.cells {
            let start =
                format!("| {} | {} | {} | {} |", cell.driver, cell.driver_suite, cell.kernel, cell.kernel_suite);
            assert_eq!(text.matches(&start).count(), 1, "{start}\n{text}");
        }
        assert!(
            text.contains("| 550.163.01 | trixie | 6.12.107 | trixie | yes, with pci-resize-resource-exclude-bars |")
        );
        assert!(text.contains("`>=6.12.97, <6.13` or `>=6.19`"), "{text}");
    }

    #[test]
    fn every_group_is_in_the_table_with_its_reason() {
        let catalogue = Catalogue::own().unwrap();
        let text = profiles(&catalogue);
        for group in &catalogue.groups {
            assert!(text.contains(&format!("| {} | {} |", group.name, group.reason)), "{}", group.name);
        }
        assert!(text.contains("`libcuda.so`") && text.contains("`gsp_*.bin`"), "{text}");
    }

    #[test]
    fn bars_and_newlines_in_cells_are_escaped() {
        let rows = [["a|b".to_owned(), "two\nlines".to_owned()]];
        assert_eq!(markdown(["x", "y"], rows.into_iter()), "| x | y |\n|---|---|\n| a\\|b | two lines |\n");
    }
}
