//! Graphs as text.

use std::fmt::{self, Write as _};

use crate::{Attr, Graph, Node, ValueId, ValueType};

/// Maximum number of elements of a list in a dump.
const LONGEST_LIST: usize = 8;

impl fmt::Display for ValueType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ValueType::Unknown => f.write_str("?"),
            ValueType::Tensor(dtype, Some(shape)) => write!(f, "{dtype}{shape}"),
            ValueType::Tensor(dtype, None) => write!(f, "{dtype}[..]"),
            ValueType::Sequence(dtype) => write!(f, "seq({dtype})"),
        }
    }
}

fn list<T: fmt::Display>(items: &[T]) -> String {
    let shown: Vec<String> = items.iter().take(LONGEST_LIST).map(ToString::to_string).collect();
    let rest =
        if items.len() > LONGEST_LIST { format!(", .. {} in all", items.len()) } else { String::new() };
    format!("[{}{rest}]", shown.join(", "))
}

impl fmt::Display for Attr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Attr::Float(v) => write!(f, "{v:?}"),
            Attr::Int(v) => write!(f, "{v}"),
            Attr::String(v) => write!(f, "{v:?}"),
            Attr::Tensor(v) => write!(f, "{v:?}"),
            Attr::Graph(v) => write!(f, "graph {:?} of {} nodes", v.name, v.nodes.len()),
            Attr::Floats(v) => f.write_str(&list(v)),
            Attr::Ints(v) => f.write_str(&list(v)),
            Attr::Strings(v) => f.write_str(&list(v)),
        }
    }
}

impl Graph {
    fn dump_into(&self, indent: &str, out: &mut String) {
        let typed = |id: &ValueId| format!("{}: {}", self.name_of(*id), self.value(*id).ty);
        let _ = writeln!(out, "{indent}graph {:?}", self.name);
        for id in &self.inputs {
            let _ = writeln!(out, "{indent}  input    {}", typed(id));
        }
        for id in self.value_ids() {
            if let Some(tensor) = &self.value(id).constant {
                let _ = writeln!(out, "{indent}  constant {}: {tensor:?}", self.name_of(id));
            }
        }
        for node in &self.nodes {
            self.dump_node(node, indent, out);
        }
        for id in &self.outputs {
            let _ = writeln!(out, "{indent}  output   {}", typed(id));
        }
    }

    fn dump_node(&self, node: &Node, indent: &str, out: &mut String) {
        let outputs: Vec<String> = node
            .outputs
            .iter()
            .map(|port| port.map_or("_".into(), |id| format!("{}: {}", self.name_of(id), self.value(id).ty)))
            .collect();
        let inputs: Vec<&str> =
            node.inputs.iter().map(|port| port.map_or("_", |id| self.name_of(id))).collect();
        let attrs: Vec<String> = node.attrs.0.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let attrs = if attrs.is_empty() { String::new() } else { format!(" {{{}}}", attrs.join(", ")) };
        let _ = writeln!(
            out,
            "{indent}  {} = {}({}){attrs}",
            outputs.join(", "),
            node.op_label(),
            inputs.join(", ")
        );
        for (name, subgraph) in Graph::subgraphs(node) {
            let _ = writeln!(out, "{indent}    {name}:");
            subgraph.dump_into(&format!("{indent}      "), out);
        }
    }
}

/// One line for each input, constant, node and output; subgraphs are indented.
impl fmt::Display for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = String::new();
        self.dump_into("", &mut out);
        f.write_str(&out)
    }
}
