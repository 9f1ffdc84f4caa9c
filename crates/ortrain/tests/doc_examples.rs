//! Every public type, constructor and free function of this crate has an example in its documentation. A method needs
//! none: the example of its type shows the important ones. `cargo test --doc` runs the examples.

use std::path::Path;

/// Returns true if a line, together with the next one, begins a function with a receiver (`self`).
fn is_method(line: &str, next: &str) -> bool {
    let Some((_, arguments)) = line.split_once('(') else { return false };
    let first = if arguments.is_empty() { next } else { arguments };
    let first = first.split([',', ')']).next().unwrap_or_default();
    matches!(first, "self" | "mut self") || first.starts_with('&') && first.ends_with("self")
}

/// Returns the public types, constructors and free functions of a file without example, with their lines. Items of
/// tests, which come last, do not count.
fn without_example(text: &str) -> Vec<(usize, String)> {
    // Re-exports of other crates have their documentation here, too.
    let keywords = ["fn ", "struct ", "enum ", "trait ", "type ", "use ortrain_", "use bytes::"];
    let (mut found, mut example, mut attribute, mut fenced) = (Vec::new(), false, false, false);
    let mut lines = (1..).zip(text.lines().map(str::trim)).peekable();
    while let Some((line_number, line)) = lines.next() {
        if line == "#[cfg(test)]" {
            break;
        }
        if let Some(documentation) = line.strip_prefix("///") {
            let documentation = documentation.trim();
            if documentation.starts_with("```") {
                // A block of another language (a formula, a table) is no example.
                example |= !fenced && documentation == "```";
                fenced = !fenced;
            }
        } else if line.starts_with("#[") || attribute {
            attribute = !line.ends_with(']');
        } else {
            let item = line.strip_prefix("pub ").map(|item| item.trim_start_matches("const "));
            if let Some(item) = item.filter(|item| keywords.iter().any(|keyword| item.starts_with(keyword))) {
                let name = item.split(['(', '<', '{', ';', '=']).next().unwrap_or(item).trim();
                let next = lines.peek().map_or("", |(_, next)| next);
                let is_exempt = item.starts_with("fn ") && is_method(item, next);
                if !example && !is_exempt {
                    found.push((line_number, name.to_owned()));
                }
            }
            example = false;
        }
    }
    found
}

#[test]
fn every_public_item_has_an_example() {
    let mut missing = Vec::new();
    let mut files = 0;
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    let mut paths = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { folders.push(path) } else { paths.push(path) }
        }
    }
    for path in paths {
        let text = std::fs::read_to_string(&path).unwrap();
        let name = path.file_name().unwrap().display().to_string();
        missing
            .extend(without_example(&text).into_iter().map(|(line, item)| format!("{name}:{line}: {item}")));
        files += 1;
    }
    assert!(files > 20);
    assert!(missing.is_empty(), "without an example: {missing:#?}");
}

#[test]
fn finds_items_without_example() {
    let text = "/// A sum:
        ///
        /// ```text
        /// a + b
        /// ```
        ///
        /// ```
        /// assert_eq!(sum(1, 2), 3);
        /// ```
        #[must_use]
        pub fn sum(a: i32, b: i32) -> i32 {}";
    assert!(without_example(text).is_empty());
    let formula_only =
        text.replace("/// ```\n        #", "#").replace("/// ```\n        /// assert", "/// assert");
    assert_eq!(without_example(&formula_only), [(9, "fn sum".to_owned())]);
    let attributes = "/// Described.\n#[derive(\nDebug\n)]\npub struct Two<T> {\n/// A field.\npub a: T }";
    assert_eq!(without_example(attributes), [(5, "struct Two".to_owned())]);
    assert!(without_example("fn private() {}\npub(crate) fn inner() {}").is_empty());
    let methods = "pub fn count(&self) -> usize {\n}\npub fn run(\n&'a mut self,\nx: u8) {\n}\npub fn take(mut self) {\n}";
    assert!(without_example(methods).is_empty());
    let constructors = "pub fn new(parts: &Parts) -> Parts {\n}\npub fn open(\npath: &Path) -> Parts {\n}";
    assert_eq!(without_example(constructors), [(1, "fn new".to_owned()), (3, "fn open".to_owned())]);
}
