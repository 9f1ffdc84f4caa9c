//! Library of functions for kernels. A module contains only the functions that its kernels call.

use rustc_hash::FxHashMap;

/// Functions of a language.
#[derive(Debug)]
pub(crate) struct Library {
    functions: Vec<Function>,
    /// Indices of the functions of each name. Overloads share a name.
    indices: FxHashMap<String, Vec<usize>>,
}

/// Function of the library.
#[derive(Debug)]
struct Function {
    text: String,
    /// Indices of the functions that it calls.
    calls: Vec<usize>,
}

impl Library {
    /// Creates a library from the name and the text of each function.
    pub(crate) fn new(functions: Vec<(String, String)>) -> Library {
        let mut indices: FxHashMap<String, Vec<usize>> = FxHashMap::default();
        for (k, (name, _)) in functions.iter().enumerate() {
            indices.entry(name.clone()).or_default().push(k);
        }
        let calls = |text: &str| -> Vec<usize> {
            called_names(text).filter_map(|name| indices.get(name)).flatten().copied().collect()
        };
        let functions =
            functions.into_iter().map(|(_, text)| Function { calls: calls(&text), text }).collect();
        Library { functions, indices }
    }

    /// Returns the functions that some texts call, directly or indirectly, in library order.
    pub(crate) fn needed_by<'t>(&self, texts: impl IntoIterator<Item = &'t str>) -> Vec<&str> {
        let mut is_needed = vec![false; self.functions.len()];
        let called = texts.into_iter().flat_map(called_names).filter_map(|name| self.indices.get(name));
        let mut open: Vec<usize> = called.flatten().copied().collect();
        while let Some(number) = open.pop() {
            if !is_needed[number] {
                is_needed[number] = true;
                open.extend(&self.functions[number].calls);
            }
        }
        let needed = self.functions.iter().zip(is_needed).filter(|(_, is_needed)| *is_needed);
        needed.map(|(function, _)| function.text.as_str()).collect()
    }
}

/// Splits a text into its functions, each with its name. A function begins with `head` at the start of a line. Comments
/// between functions belong to no function.
pub(crate) fn split_functions(text: &str, head: &str) -> Vec<(String, String)> {
    let mut functions: Vec<(String, String)> = Vec::new();
    let mut is_inside = false;
    for line in text.lines() {
        if line.starts_with(head) {
            let name = called_names(line).next().unwrap_or_default();
            functions.push((name.to_owned(), String::new()));
            is_inside = true;
        }
        is_inside &= !line.starts_with("//");
        if let Some((_, text)) = functions.last_mut().filter(|_| is_inside) {
            text.push_str(line);
            text.push('\n');
        }
    }
    functions
}

/// Returns the names before opening parentheses.
pub(crate) fn called_names(text: &str) -> impl Iterator<Item = &str> {
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
        let text = "// A text.\nfn a() {\n  b();\n}\n// A word.\nfn b() { }\nfn c() { a(); }\nfn ab() { }\n";
        let library = Library::new(split_functions(text, "fn "));
        assert_eq!(library.needed_by(["x = a();"]), ["fn a() {\n  b();\n}\n", "fn b() { }\n"]);
        assert_eq!(library.needed_by(["x = (ab() + a);"]), ["fn ab() { }\n"]);
    }

    #[test]
    fn overloads_belong_together() {
        let library = Library::new(split_functions("fn a(int x) { }\nfn a(float x) { }\n", "fn "));
        assert_eq!(library.needed_by(["a(1)"]).len(), 2);
    }
}
