//! Library of functions for kernels. A kernel includes only the functions that it needs.

use std::ops::Range;

use rustc_hash::FxHashMap;

/// Functions of a language. Each begins with `fn NAME(` at the start of a line.
#[derive(Debug)]
pub(crate) struct Prelude {
    text: String,
    items: Vec<Item>,
    indices: FxHashMap<String, usize>,
}

/// Function of the library.
#[derive(Debug)]
struct Item {
    range: Range<usize>,
    /// Indices of the functions that it calls.
    calls: Vec<usize>,
}

impl Prelude {
    pub(crate) fn new(text: String) -> Prelude {
        let starts: Vec<usize> = text.match_indices("\nfn ").map(|(at, _)| at + 1).collect();
        let mut items = Vec::new();
        let mut numbers = FxHashMap::default();
        for (k, &start) in starts.iter().enumerate() {
            let item = &text[start..starts.get(k + 1).copied().unwrap_or(text.len())];
            // Comments between functions belong to no function.
            let end = item.find("\n//").map_or(item.len(), |at| at + 1);
            let name = &item[3..item.find('(').unwrap_or(3)];
            numbers.insert(name.to_owned(), items.len());
            items.push(Item { range: start..start + end, calls: Vec::new() });
        }
        for item in &mut items {
            item.calls = called_names(&text[item.range.clone()])
                .filter_map(|name| numbers.get(name).copied())
                .collect();
        }
        Prelude { text, items, indices: numbers }
    }

    pub(crate) fn text(&self) -> &str {
        &self.text
    }

    /// Returns the source of the functions that a text needs, in library order.
    pub(crate) fn needed_by(&self, text: &str) -> String {
        let mut is_needed = vec![false; self.items.len()];
        let mut open: Vec<usize> =
            called_names(text).filter_map(|name| self.indices.get(name).copied()).collect();
        while let Some(number) = open.pop() {
            if !is_needed[number] {
                is_needed[number] = true;
                open.extend(&self.items[number].calls);
            }
        }
        let needed = self.items.iter().zip(is_needed).filter(|(_, is_needed)| *is_needed);
        needed.map(|(item, _)| &self.text[item.range.clone()]).collect()
    }
}

/// Returns the names before opening parentheses.
fn called_names(text: &str) -> impl Iterator<Item = &str> {
    text.match_indices('(').map(|(at, _)| {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let start = text[..at].rfind(|c| !is_part(c)).map_or(0, |before| before + 1);
        &text[start..at]
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn needed_functions_include_callees() {
        let text = "\nfn a() { b(); }\n// A word.\nfn b() { }\nfn c() { a(); }\nfn ab() { }\n";
        let prelude = Prelude::new(text.to_owned());
        assert_eq!(prelude.needed_by("x = a();"), "fn a() { b(); }\nfn b() { }\n");
        assert_eq!(prelude.needed_by("x = (ab() + a);"), "fn ab() { }\n");
    }
}
