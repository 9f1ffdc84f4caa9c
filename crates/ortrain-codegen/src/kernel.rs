//! Kernel under construction: its bindings, and its statements so far.

use std::fmt::Write;
use std::sync::Arc;

use ortrain_expr::{DType, Scalar};
use ortrain_program::{BufferId, align};

use crate::bindings::{Region, Regions};
use crate::dialect::{DeclaredBinding, Dialect, GROUP_SIZE, MAX_SHARED_BYTES, SharedArray};
use crate::launch::{Binding, Caps, KernelSource, Launch, MemoryId, RUN_WORDS};
use crate::repr::{Repr, Value, word_of};

/// Memory of a binding.
#[derive(Clone, Debug, PartialEq)]
enum Source {
    Region(usize),
    Scratch,
    Run,
    Fault,
    Table(Arc<[u32]>),
}

/// Kernel under construction.
#[derive(Debug)]
pub(crate) struct Kernel<'a> {
    pub(crate) dialect: &'a dyn Dialect,
    regions: &'a Regions<'a>,
    caps: &'a Caps,
    sources: Vec<Source>,
    declared: Vec<DeclaredBinding>,
    shared: Vec<SharedArray>,
    /// Regions that are bound as quads of words.
    wide: Vec<usize>,
    /// Condition for stores of results, if any. Single invocations of a group must not leave the kernel early.
    pub(crate) store_condition: Option<String>,
    body: String,
    names: usize,
    /// Open braces that [`Kernel::close_to`] closes.
    depth: usize,
}

/// Invocations of a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// Number of independent invocations; `id` is the index of an invocation.
    Points(u64),
    /// Number of whole groups; `group` is the index of a group, `lane` the index of an invocation in its group.
    Groups(u64),
}

impl<'a> Kernel<'a> {
    pub(crate) fn new(dialect: &'a dyn Dialect, regions: &'a Regions<'a>, caps: &'a Caps) -> Kernel<'a> {
        Kernel {
            dialect,
            regions,
            caps,
            sources: Vec::new(),
            declared: Vec::new(),
            shared: Vec::new(),
            wide: Vec::new(),
            store_condition: None,
            body: String::new(),
            names: 0,
            depth: 0,
        }
    }

    /// Adds a statement.
    pub(crate) fn line(&mut self, text: &str) {
        let _ = writeln!(self.body, "{text}");
    }

    /// Returns a new unique name.
    pub(crate) fn name(&mut self) -> String {
        self.names += 1;
        format!("v{}", self.names)
    }

    /// Defines a name for a value.
    pub(crate) fn define(&mut self, Value { text, repr }: Value) -> Value {
        let name = self.name();
        let line = self.dialect.define(&name, repr, &text);
        self.line(&line);
        Value::new(name, repr)
    }

    /// Defines a name for a 32-bit signed integer.
    pub(crate) fn int(&mut self, text: String) -> String {
        self.define(Value::new(text, Repr::I32)).text
    }

    /// Defines a mutable variable.
    pub(crate) fn variable(&mut self, value: &Value) -> Value {
        let name = self.name();
        let line = self.dialect.variable(&name, value.repr, &value.text);
        self.line(&line);
        Value::new(name, value.repr)
    }

    pub(crate) fn assign(&mut self, to: &Value, value: &Value) {
        self.line(&format!("{} = {};", to.text, value.text));
    }

    /// Starts a loop and returns the name of its counter. A loop without iterations becomes an `if (false)` block,
    /// because some drivers fail on such loops.
    pub(crate) fn begin_loop(&mut self, from: &str, to: &str) -> String {
        let name = self.name();
        if from == to {
            self.begin_if("false");
            let counter = self.dialect.define(&name, Repr::I32, from);
            self.line(&counter);
        } else {
            let head = self.dialect.loop_head(&name, from, to);
            self.line(&head);
            self.depth += 1;
        }
        name
    }

    /// Starts a block with a condition.
    pub(crate) fn begin_if(&mut self, condition: &str) {
        self.line(&format!("if ({condition}) {{"));
        self.depth += 1;
    }

    /// Returns the number of open blocks.
    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    /// Closes blocks until `depth` blocks are open.
    pub(crate) fn close_to(&mut self, depth: usize) {
        while self.depth > depth {
            self.line("}");
            self.depth -= 1;
        }
    }

    pub(crate) fn select(&self, condition: &str, yes: &str, no: &str) -> String {
        self.dialect.select(condition, yes, no)
    }

    pub(crate) fn constant(&self, value: Scalar, repr: Repr) -> Value {
        Value::new(self.dialect.constant(value, repr), repr)
    }

    fn binding(&mut self, source: Source, atomic: bool) -> DeclaredBinding {
        let at = self.sources.iter().position(|known| *known == source).unwrap_or_else(|| {
            let is_wide = matches!(&source, Source::Region(region) if self.wide.contains(region));
            self.declared.push(DeclaredBinding { name: format!("b{}", self.sources.len()), atomic, is_wide });
            self.sources.push(source);
            self.sources.len() - 1
        });
        self.declared[at].clone()
    }

    /// Returns the binding of a buffer, and the index of the buffer's first element in it.
    pub(crate) fn buffer(&mut self, id: BufferId) -> (DeclaredBinding, isize) {
        let region = self.regions.region_of(id);
        let atomic = self.regions.regions[region].atomic;
        (self.binding(Source::Region(region), atomic), self.regions.first_element(id))
    }

    /// Returns the type of the elements of a buffer.
    pub(crate) fn dtype(&self, id: BufferId) -> DType {
        self.regions.program.buffer(id).dtype
    }

    /// Binds the region of a buffer as quads of words. The kernel must not access the region in any other way.
    pub(crate) fn bind_as_quads(&mut self, id: BufferId) {
        self.wide.push(self.regions.region_of(id));
    }

    /// Converts a value to another type, with the semantics of [`ortrain_expr::Inst::Convert`].
    pub(crate) fn as_repr(&self, value: &Value, to: Repr) -> Value {
        let text = &value.text;
        if value.repr == to {
            return value.clone();
        }
        let converted = match (value.repr, to) {
            (Repr::F64, _) | (_, Repr::F64) => self.as_double(value, to),
            (Repr::Bool, Repr::F32) => self.select(text, "1.0f", "0.0f"),
            (Repr::Bool, Repr::I32) => self.select(text, "1", "0"),
            (Repr::Bool, Repr::U32) => self.select(text, "1u", "0u"),
            (Repr::Bool, Repr::I64 | Repr::U64) => format!("pair_of_u32({})", self.select(text, "1u", "0u")),
            (Repr::F32, Repr::Bool) => format!("is_not_zero({text})"),
            (Repr::I32, Repr::Bool) => format!("({text} != 0)"),
            (Repr::U32, Repr::Bool) => format!("({text} != 0u)"),
            (Repr::I64 | Repr::U64, Repr::Bool) => format!("(!is_zero_pair({text}))"),
            (Repr::F32, Repr::I32) => format!("i32_of_f32({text})"),
            (Repr::F32, Repr::U32) => format!("u32_of_f32({text})"),
            (Repr::F32, Repr::I64) => format!("i64_of_f32({text})"),
            (Repr::F32, Repr::U64) => format!("u64_of_f32({text})"),
            (Repr::I32, Repr::F32) => format!("f32_of_i32({text})"),
            (Repr::U32, Repr::F32) => format!("f32_of_u32({text})"),
            (Repr::I64, Repr::F32) => format!("f32_of_i64({text})"),
            (Repr::U64, Repr::F32) => format!("f32_of_u64({text})"),
            (Repr::I32, Repr::U32) => format!("bits_of_int({text})"),
            (Repr::U32, Repr::I32) => format!("int_of({text})"),
            (Repr::I32, Repr::I64 | Repr::U64) => format!("pair_of_i32({text})"),
            (Repr::U32, Repr::I64 | Repr::U64) => format!("pair_of_u32({text})"),
            (Repr::I64 | Repr::U64, Repr::I32) => format!("int_of(low({text}))"),
            (Repr::I64 | Repr::U64, Repr::U32) => format!("low({text})"),
            _ => text.clone(),
        };
        Value::new(converted, to)
    }

    /// Returns the text of a conversion to or from a 64-bit float.
    fn as_double(&self, Value { text, repr }: &Value, to: Repr) -> String {
        match (repr, to) {
            (Repr::Bool, _) => {
                let [yes, no] = [1.0, 0.0].map(|value| self.constant(Scalar::F64(value), Repr::F64).text);
                self.select(text, &yes, &no)
            }
            (Repr::F32, _) => format!("f64_of_f32({text})"),
            (Repr::I32, _) => format!("f64_of_i32({text})"),
            (Repr::U32, _) => format!("f64_of_u32({text})"),
            (Repr::I64, _) => format!("f64_of_i64({text})"),
            (Repr::U64, _) => format!("f64_of_u64({text})"),
            (Repr::F64, Repr::Bool) => format!("is_not_zero_f64({text})"),
            (Repr::F64, Repr::F32) => format!("f32_of_f64({text})"),
            (Repr::F64, Repr::I32) => format!("i32_of_f64({text})"),
            (Repr::F64, Repr::U32) => format!("u32_of_f64({text})"),
            (Repr::F64, Repr::I64) => format!("i64_of_f64({text})"),
            (Repr::F64, Repr::U64) => format!("u64_of_f64({text})"),
            _ => text.clone(),
        }
    }

    /// Returns a scalar of the run: the seed (0) or the number of train steps (1).
    pub(crate) fn run_scalar(&mut self, index: usize) -> Value {
        let run = self.binding(Source::Run, false);
        let words = [2 * index, 2 * index + 1].map(|at| self.dialect.word(&run, &at.to_string()));
        Value::new(self.dialect.two_words(Repr::U64, &words[0], &words[1]), Repr::U64)
    }

    /// Returns the word with the number of the run.
    pub(crate) fn run_number(&mut self) -> String {
        let run = self.binding(Source::Run, false);
        self.dialect.word(&run, &(RUN_WORDS - 1).to_string())
    }

    /// Returns a word of a table.
    pub(crate) fn table(&mut self, words: &Arc<[u32]>, at: &str) -> Value {
        let table = self.binding(Source::Table(words.clone()), false);
        Value::new(format!("int_of({})", self.dialect.word(&table, at)), Repr::I32)
    }

    /// Returns a value that an earlier launch of the instruction stored. `at` is its index among values of the type.
    pub(crate) fn scratch(&mut self, at: &str, repr: Repr) -> Value {
        let scratch = self.binding(Source::Scratch, false);
        if repr == Repr::F64 {
            let [low, high] =
                ["", " + 1"].map(|half| self.dialect.word(&scratch, &format!("2 * ({at}){half}")));
            return Value::new(self.dialect.two_words(repr, &low, &high), repr);
        }
        let word = self.dialect.word(&scratch, at);
        let text = match repr {
            Repr::F32 => format!("float_of({word})"),
            Repr::I32 => format!("int_of({word})"),
            _ => word,
        };
        Value::new(text, repr)
    }

    /// Stores a value for a later launch of the instruction, at an index as in [`Kernel::scratch`].
    pub(crate) fn set_scratch(&mut self, at: &str, value: &Value) {
        let scratch = self.binding(Source::Scratch, false);
        if value.repr == Repr::F64 {
            for (half, part) in [("", "low"), (" + 1", "high")] {
                let word = format!("{part}({})", value.text);
                let line = self.dialect.set_word(&scratch, &format!("2 * ({at}){half}"), &word);
                self.line(&line);
            }
            return;
        }
        let word = word_of(value);
        let line = self.dialect.set_word(&scratch, at, &word);
        self.line(&line);
    }

    /// Returns a word of the fault.
    pub(crate) fn fault_word(&mut self, at: usize) -> String {
        let fault = self.binding(Source::Fault, true);
        self.dialect.word(&fault, &at.to_string())
    }

    pub(crate) fn set_fault_word(&mut self, at: usize, value: &str) {
        let fault = self.binding(Source::Fault, true);
        let line = self.dialect.set_word(&fault, &at.to_string(), value);
        self.line(&line);
    }

    pub(crate) fn min_fault_word(&mut self, at: usize, value: &str) {
        let fault = self.binding(Source::Fault, true);
        let line = self.dialect.min_word(&fault, &at.to_string(), value);
        self.line(&line);
    }

    /// Declares an array that the invocations of a group share, and returns its name.
    pub(crate) fn shared(&mut self, repr: Repr, len: usize) -> String {
        let name = format!("s{}", self.shared.len());
        self.shared.push(SharedArray { name: name.clone(), repr, len });
        name
    }

    /// Prints a barrier: writes of the group to shared arrays are visible afterwards.
    pub(crate) fn barrier(&mut self) {
        let line = self.dialect.barrier();
        self.line(&line);
    }

    /// Prints a barrier: afterwards, bindings that the group has read may be written.
    pub(crate) fn binding_barrier(&mut self) {
        let line = self.dialect.binding_barrier();
        self.line(&line);
    }

    /// Starts a block for a condition and for [`Kernel::live`], if there is any condition.
    pub(crate) fn begin_if_live(&mut self, condition: Option<String>) {
        let conditions: Vec<String> = condition.into_iter().chain(self.store_condition.clone()).collect();
        if !conditions.is_empty() {
            self.begin_if(&conditions.join(" && "));
        }
    }

    /// Returns the launch of the kernel. `scratch` is the number of bytes that the launches of the instruction share.
    pub(crate) fn finish(
        mut self,
        extent: Extent,
        instruction: usize,
        scratch: usize,
    ) -> Result<Launch, String> {
        self.close_to(0);
        if self.sources.len() > self.caps.bindings as usize {
            let (needed, limit) = (self.sources.len(), self.caps.bindings);
            self.regions.exceeds_bindings.set(true);
            return Err(format!("it needs {needed} buffer bindings, but this device allows at most {limit}"));
        }
        let shared: usize = self.shared.iter().map(SharedArray::bytes).sum();
        if shared > MAX_SHARED_BYTES {
            return Err(format!(
                "its workgroups need {shared} bytes of shared memory, but the limit is {MAX_SHARED_BYTES}"
            ));
        }
        let (points, groups) = match extent {
            Extent::Points(points) => (points, points.div_ceil(u64::from(GROUP_SIZE)).max(1)),
            Extent::Groups(groups) => (groups.saturating_mul(u64::from(GROUP_SIZE)), groups.max(1)),
        };
        let row = groups.min(u64::from(self.caps.groups)) as u32;
        let column = groups.div_ceil(u64::from(row));
        if points > u64::from(u32::MAX) - u64::from(GROUP_SIZE) || column > u64::from(self.caps.groups) {
            return Err(format!("it has {points} points, more than a dispatch can have"));
        }
        let kernel = KernelSource::new(|name| match extent {
            Extent::Points(points) => self.dialect.kernel(name, &self.declared, &self.body, points, row),
            Extent::Groups(groups) => {
                self.dialect.kernel_of_groups(name, &self.declared, &self.shared, &self.body, groups, row)
            }
        });
        let binding = |source: Source| match source {
            Source::Region(k) => {
                let Region { memory: home, start, end, .. } = self.regions.regions[k];
                Binding::Bytes { memory: home, start, len: end - start }
            }
            Source::Scratch => Binding::Bytes { memory: MemoryId::Scratch, start: 0, len: align(scratch) },
            Source::Run => Binding::Run,
            Source::Fault => Binding::Fault,
            Source::Table(words) => Binding::Table(words),
        };
        Ok(Launch {
            kernel,
            groups: [row, column as u32, 1],
            bindings: self.sources.into_iter().map(binding).collect(),
            instruction: instruction as u32,
        })
    }
}
