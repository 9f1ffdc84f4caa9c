//! Launches as text, for dumps.

use std::fmt::Write;

use ortrain_program::Program;
use rustc_hash::FxHashMap;

use crate::dialect::Dialect;
use crate::launch::{Binding, KernelSource, Lowered, MemoryId};

impl Lowered {
    /// Formats the launches of `program`, followed by the library functions and the kernels, each once.
    ///
    /// A launch has the index of its kernel, its groups by axis, the position and the node of its instruction, and its
    /// bindings.
    #[must_use]
    pub fn text(&self, program: &Program, dialect: &dyn Dialect) -> String {
        let mut numbers: FxHashMap<&KernelSource, usize> = FxHashMap::default();
        let mut sources: Vec<&KernelSource> = Vec::new();
        let mut launches = String::new();
        for (k, launch) in self.launches.iter().enumerate() {
            let kernel = *numbers.entry(&launch.kernel).or_insert_with(|| {
                sources.push(&launch.kernel);
                sources.len() - 1
            });
            let position = launch.instruction as usize;
            let scheduled = &program.instructions[position];
            let bindings: Vec<String> = launch.bindings.iter().map(describe_binding).collect();
            let _ = writeln!(
                launches,
                "  launch {k}: kernel {kernel} in {:?} groups, of instruction {position} {} ({})  # {}",
                launch.groups,
                scheduled.instruction.name(),
                bindings.join(", "),
                scheduled.node
            );
        }
        let mut text = format!(
            "{} launches, {} kernels, {} bytes of scratch\n{launches}",
            self.launches.len(),
            sources.len(),
            self.scratch
        );
        text += "library\n";
        push_indented(&mut text, &dialect.library(&sources));
        for (number, kernel) in sources.iter().enumerate() {
            let _ = writeln!(text, "kernel {number}: {}", kernel.name);
            push_indented(&mut text, &kernel.text);
        }
        text
    }
}

/// Adds the lines of a source.
fn push_indented(text: &mut String, source: &str) {
    for line in source.trim_end().lines() {
        let _ = writeln!(text, "{}", format!("  {line}").trim_end());
    }
}

/// Describes a binding.
fn describe_binding(binding: &Binding) -> String {
    match binding {
        Binding::Bytes { memory: home, start, len } => {
            let home = match home {
                MemoryId::Work => "work".to_owned(),
                MemoryId::Plane(plane) => format!("plane {}", plane.0),
                MemoryId::Constant(number) => format!("constant {number}"),
                MemoryId::Scratch => "scratch".to_owned(),
            };
            format!("{home} {start}..{}", start + len)
        }
        Binding::Run => "scalars".to_owned(),
        Binding::Fault => "fault".to_owned(),
        Binding::Table(words) => format!("table of {} words", words.len()),
    }
}
