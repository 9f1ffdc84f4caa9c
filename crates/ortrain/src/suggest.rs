//! Suggestions for misspelled names of values, nodes, inputs and parameters.

use ortrain_graph::Graph;

/// Minimum similarity of a suggestion: two of three characters are equal.
const MIN_SIMILARITY: (usize, usize) = (2, 3);

/// Maximum length of names for edit distance, since its time is quadratic.
const MAX_COMPARED_CHARS: usize = 256;

/// Returns the end of a sentence with the most similar name, or an empty text.
pub(crate) fn hint<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    nearest(name, names).map_or(String::new(), |other| format!("; did you mean {other:?}?"))
}

/// Returns the most similar name; ties are resolved alphabetically.
pub(crate) fn nearest<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if name.is_empty() {
        return None;
    }
    let normalized = normalize(name);
    names
        .into_iter()
        .filter(|other| !other.is_empty() && *other != name)
        .filter_map(|other| Some((name_distance(&normalized, name, other)?, other)))
        .min()
        .map(|(_, other)| other)
}

/// Returns the edit distance of two names. If one name ends with the other, as after a forgotten prefix, the
/// distance is larger than any edit distance, but not `None`.
fn name_distance(normalized: &str, name: &str, other: &str) -> Option<usize> {
    let candidate = normalize(other);
    let (name_len, its) = (normalized.chars().count(), candidate.chars().count());
    let longer = name_len.max(its);
    let max_distance = longer * (MIN_SIMILARITY.1 - MIN_SIMILARITY.0) / MIN_SIMILARITY.1;
    let ends = other.ends_with(name) || name.ends_with(other);
    if name_len.abs_diff(its) <= max_distance && longer <= MAX_COMPARED_CHARS {
        let changes = strsim::osa_distance(normalized, &candidate);
        if changes <= max_distance {
            return Some(changes);
        }
    }
    ends.then_some(longer)
}

/// Normalizes case and separators.
fn normalize(name: &str) -> String {
    name.chars()
        .map(|sign| if matches!(sign, '.' | '/' | '-' | ':' | ' ') { '_' } else { sign })
        .flat_map(char::to_lowercase)
        .collect()
}

/// Returns a hint about an unknown value of a graph: the output of the node with this name, or the most
/// similar name.
pub(crate) fn hint_in(graph: &Graph, name: &str) -> String {
    let node = graph.nodes.iter().find(|node| !name.is_empty() && *node.name == *name);
    let outputs: Vec<String> = node
        .iter()
        .flat_map(|node| node.present_outputs())
        .map(|id| format!("{:?}", graph.name_of(id)))
        .collect();
    if !outputs.is_empty() {
        return format!("; a node has this name, and its output is {}", outputs.join(", "));
    }
    let of_values = hint(name, graph.value_ids().map(|id| graph.name_of(id)));
    if !of_values.is_empty() {
        return of_values;
    }
    nearest(name, graph.nodes.iter().map(|node| &*node.name))
        .map_or(String::new(), |node| hint_of_node(graph, node))
}

fn hint_of_node(graph: &Graph, name: &str) -> String {
    let node = graph.nodes.iter().find(|node| *node.name == *name);
    let output = node.and_then(|node| node.present_outputs().next()).map(|id| graph.name_of(id));
    output.map_or(String::new(), |output| format!("; did you mean {output:?}, the output of node {name:?}?"))
}

#[cfg(test)]
mod tests {
    use super::hint;

    #[test]
    fn suggests_similar_names() {
        let names = ["fc1.weight", "fc1.bias", "fc2.weight", "encoder.layer.0.bias"];
        for (misspelled, meant) in [
            ("fc1.wieght", Some("fc1.weight")),
            ("FC1.Weight", Some("fc1.weight")),
            ("fc1_weight", Some("fc1.weight")),
            ("fc2.weights", Some("fc2.weight")),
            ("fc3.weight", Some("fc1.weight")),
            ("layer.0.bias", Some("encoder.layer.0.bias")),
            ("module.fc1.bias", Some("fc1.bias")),
            ("x", None),
            ("", None),
            ("logits", None),
        ] {
            let expected = meant.map_or(String::new(), |meant| format!("; did you mean {meant:?}?"));
            assert_eq!(hint(misspelled, names), expected, "{misspelled}");
        }
    }

    /// Names from untrusted files may have any length: the edit distance of long ones would take too long.
    #[test]
    fn skips_long_names() {
        let names: Vec<String> = (0..200).map(|k| format!("{k}{}", "a".repeat(100_000))).collect();
        assert_eq!(hint(&format!("b{}", "a".repeat(100_000)), names.iter().map(String::as_str)), "");
    }
}
