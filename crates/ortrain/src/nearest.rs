//! Hints at names that may have been meant: of values, nodes, inputs and parameters.

use ortrain_graph::Graph;

/// The least similarity for which a name is proposed: of three letters, two are right.
const RIGHT_OF: (usize, usize) = (2, 3);

/// The end of a sentence that names the nearest of the names there are, or nothing if none is near.
pub(crate) fn hint<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> String {
    nearest(name, names).map_or(String::new(), |other| format!("; did you mean {other:?}?"))
}

/// The name that is most like another one; of equally near ones the first in the alphabet.
pub(crate) fn nearest<'a>(name: &str, names: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if name.is_empty() {
        return None;
    }
    let wanted: Vec<char> = folded(name);
    names
        .into_iter()
        .filter(|other| !other.is_empty() && *other != name)
        .filter_map(|other| Some((distance_to(&wanted, name, other)?, other)))
        .min()
        .map(|(_, other)| other)
}

/// How far off a name is: changed letters, or more than any of these if one name ends with the other, as where a prefix
/// is forgotten.
fn distance_to(wanted: &[char], name: &str, other: &str) -> Option<usize> {
    let there = folded(other);
    let longer = wanted.len().max(there.len());
    let most = longer * (RIGHT_OF.1 - RIGHT_OF.0) / RIGHT_OF.1;
    let ends = other.ends_with(name) || name.ends_with(other);
    if wanted.len().abs_diff(there.len()) <= most {
        let changes = changes(wanted, &there);
        if changes <= most {
            return Some(changes);
        }
    }
    ends.then_some(longer)
}

/// Letters alike in upper and lower case, and the signs that join words.
fn folded(name: &str) -> Vec<char> {
    name.chars()
        .map(|sign| if matches!(sign, '.' | '/' | '-' | ':' | ' ') { '_' } else { sign })
        .flat_map(char::to_lowercase)
        .collect()
}

/// The optimal string alignment distance: letters put in, left out, replaced, or swapped with their neighbour.
fn changes(a: &[char], b: &[char]) -> usize {
    let (mut before, mut last, mut row) = (Vec::new(), (0..=b.len()).collect::<Vec<usize>>(), Vec::new());
    for (i, x) in a.iter().enumerate() {
        row.clear();
        row.push(i + 1);
        for (j, y) in b.iter().enumerate() {
            let mut least = (last[j] + usize::from(x != y)).min(last[j + 1] + 1).min(row[j] + 1);
            if i > 0 && j > 0 && *x == b[j - 1] && a[i - 1] == *y {
                least = least.min(before[j - 1] + 1);
            }
            row.push(least);
        }
        std::mem::swap(&mut before, &mut last);
        std::mem::swap(&mut last, &mut row);
    }
    last[b.len()]
}

/// The end of a sentence about a value that a graph does not have: the node of this name, or the nearest name.
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
    use super::{changes, hint};

    #[test]
    fn what_is_near_is_proposed() {
        let names = ["fc1.weight", "fc1.bias", "fc2.weight", "encoder.layer.0.bias"];
        for (given, meant) in [
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
            assert_eq!(hint(given, names), expected, "{given}");
        }
    }

    #[test]
    fn changes_of_letters() {
        for (a, b, count) in
            [("", "abc", 3), ("abc", "acb", 1), ("kitten", "sitting", 3), ("same", "same", 0)]
        {
            let [a, b] = [a, b].map(|text| text.chars().collect::<Vec<char>>());
            assert_eq!((changes(&a, &b), changes(&b, &a)), (count, count));
        }
    }
}
