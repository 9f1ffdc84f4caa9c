//! A kernel while it is printed: its bindings, and its statements so far.

use std::fmt::Write;
use std::sync::Arc;

use ortrain_expr::{DType, Scalar, Type};
use ortrain_program::{ALIGNMENT, BufferId, Place, Program, align};

use crate::dialect::{Declared, Dialect, GROUP, Repr};
use crate::expr::repr_of;
use crate::launch::{Binding, Caps, Home, Launch};

/// A value that was printed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Value {
    pub(crate) text: String,
    pub(crate) repr: Repr,
}

impl Value {
    pub(crate) fn new(text: impl Into<String>, repr: Repr) -> Value {
        Value { text: text.into(), repr }
    }
}

/// Bytes of a memory that are one binding, since buffers of an instruction share them.
#[derive(Clone, Debug)]
struct Region {
    home: Home,
    start: usize,
    end: usize,
    /// True if elements narrower than a word are written.
    atomic: bool,
}

/// The memory of an instruction, cut into regions that share no bytes.
#[derive(Debug)]
pub(crate) struct Regions<'a> {
    program: &'a Program,
    regions: Vec<Region>,
}

/// The bytes of a buffer in its memory.
fn bytes_of(program: &Program, id: BufferId) -> (Home, usize, usize) {
    let buffer = program.buffer(id);
    let (home, start) = match buffer.place {
        Place::Work(at) => (Home::Work, at),
        Place::Plane(plane, at) => (Home::Plane(plane), at),
        Place::Constant(number) => (Home::Constant(number), 0),
    };
    (home, start, start + buffer.bytes())
}

impl<'a> Regions<'a> {
    /// The regions of buffers, of which some are written.
    pub(crate) fn new(
        program: &'a Program,
        buffers: &[(BufferId, bool)],
        caps: &Caps,
    ) -> Result<Regions<'a>, String> {
        let mut regions: Vec<Region> = Vec::new();
        for &(id, written) in buffers {
            let (home, start, end) = bytes_of(program, id);
            let buffer = program.buffer(id);
            if !start.is_multiple_of(buffer.dtype.size()) {
                return Err(format!("{:?} lies at byte {start}, inside of an element", buffer.label));
            }
            let (start, end) = (start / ALIGNMENT * ALIGNMENT, end.next_multiple_of(4));
            let atomic = written && buffer.dtype.size() < 4;
            let mut new = Region { home, start, end: end.max(start + 4), atomic };
            regions.retain(|old| {
                let meets = old.home == new.home && old.start < new.end && new.start < old.end;
                if meets {
                    new.start = new.start.min(old.start);
                    new.end = new.end.max(old.end);
                    new.atomic |= old.atomic;
                }
                !meets
            });
            let bytes = (new.end - new.start) as u64;
            if bytes > caps.binding_bytes {
                let most = caps.binding_bytes;
                return Err(format!(
                    "{:?} is bound with {bytes} bytes, and this device binds at most {most}",
                    buffer.label
                ));
            }
            regions.push(new);
        }
        Ok(Regions { program, regions })
    }

    fn of(&self, id: BufferId) -> usize {
        let (home, start, end) = bytes_of(self.program, id);
        let holds = |region: &Region| region.home == home && region.start <= start && end <= region.end;
        self.regions.iter().position(holds).expect("every buffer of the instruction has a region")
    }
}

/// The memory behind a binding of a kernel.
#[derive(Clone, Debug, PartialEq)]
enum Source {
    Region(usize),
    Scratch,
    Run,
    Fault,
    Table(Arc<[u32]>),
}

/// A kernel under construction.
#[derive(Debug)]
pub(crate) struct Kernel<'a> {
    pub(crate) dialect: &'a dyn Dialect,
    regions: &'a Regions<'a>,
    caps: &'a Caps,
    sources: Vec<Source>,
    declared: Vec<Declared>,
    body: String,
    names: usize,
    /// Open braces that [`Kernel::close`] closes.
    depth: usize,
}

impl<'a> Kernel<'a> {
    pub(crate) fn new(dialect: &'a dyn Dialect, regions: &'a Regions<'a>, caps: &'a Caps) -> Kernel<'a> {
        Kernel {
            dialect,
            regions,
            caps,
            sources: Vec::new(),
            declared: Vec::new(),
            body: String::new(),
            names: 0,
            depth: 0,
        }
    }

    /// Adds a statement.
    pub(crate) fn line(&mut self, text: &str) {
        let _ = writeln!(self.body, "{text}");
    }

    /// A name that no other value has.
    pub(crate) fn name(&mut self) -> String {
        self.names += 1;
        format!("v{}", self.names)
    }

    /// Gives a value a name.
    pub(crate) fn define(&mut self, Value { text, repr }: Value) -> Value {
        let name = self.name();
        let line = self.dialect.define(&name, repr, &text);
        self.line(&line);
        Value::new(name, repr)
    }

    /// A name whose value changes.
    pub(crate) fn variable(&mut self, value: &Value) -> Value {
        let name = self.name();
        let line = self.dialect.variable(&name, value.repr, &value.text);
        self.line(&line);
        Value::new(name, value.repr)
    }

    pub(crate) fn assign(&mut self, to: &Value, value: &Value) {
        self.line(&format!("{} = {};", to.text, value.text));
    }

    /// Starts a loop; the name of its counter.
    pub(crate) fn counted(&mut self, from: &str, to: &str) -> String {
        let name = self.name();
        let head = self.dialect.counted(&name, from, to);
        self.line(&head);
        self.depth += 1;
        name
    }

    /// Starts a block that runs where a condition holds.
    pub(crate) fn when(&mut self, condition: &str) {
        self.line(&format!("if ({condition}) {{"));
        self.depth += 1;
    }

    /// The number of open blocks.
    pub(crate) fn depth(&self) -> usize {
        self.depth
    }

    /// Ends the blocks that were started since there were so many.
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

    fn binding(&mut self, source: Source, atomic: bool) -> Declared {
        let at = self.sources.iter().position(|known| *known == source).unwrap_or_else(|| {
            self.declared.push(Declared { name: format!("b{}", self.sources.len()), atomic });
            self.sources.push(source);
            self.sources.len() - 1
        });
        self.declared[at].clone()
    }

    /// The binding of a buffer, and the number of its first element there.
    fn buffer(&mut self, id: BufferId) -> (Declared, usize) {
        let region = self.regions.of(id);
        let Region { start, atomic, .. } = self.regions.regions[region];
        let (_, first, _) = bytes_of(self.regions.program, id);
        let size = self.regions.program.buffer(id).dtype.size();
        (self.binding(Source::Region(region), atomic), (first - start) / size)
    }

    /// An element of a buffer, computed as elements of its type are.
    pub(crate) fn load(&mut self, id: BufferId, at: &str) -> Result<Value, String> {
        let dtype = self.regions.program.buffer(id).dtype;
        let (binding, base) = self.buffer(id);
        let at = if base == 0 { at.to_owned() } else { format!("{base} + {at}") };
        let word = |at: &str| self.dialect.word(&binding, at);
        Ok(match dtype {
            DType::F32 => Value::new(format!("float_of({})", word(&at)), Repr::F32),
            DType::I32 => Value::new(format!("int_of({})", word(&at)), Repr::I32),
            DType::U32 => Value::new(word(&at), Repr::U32),
            DType::I64 | DType::U64 | DType::F64 => {
                let repr = repr_of(Type::of(dtype));
                let (low, high) = (word(&format!("2 * ({at})")), word(&format!("2 * ({at}) + 1")));
                Value::new(format!("pair({low}, {high})"), repr)
            }
            narrow => {
                let place = self.define(Value::new(at, Repr::I32));
                let bits = 8 * narrow.size();
                let (shift, part) = if bits == 8 { (2, 3) } else { (1, 1) };
                let word = self.dialect.word(&binding, &format!("{} >> {shift}u", place.text));
                let by = format!("(bits_of_int({} & {part}) * {bits}u)", place.text);
                let raw = format!("(({word} >> {by}) & {}u)", (1u32 << bits) - 1);
                match narrow {
                    DType::F16 => Value::new(format!("f32_of_f16({raw})"), Repr::F32),
                    DType::BF16 => Value::new(format!("f32_of_bf16({raw})"), Repr::F32),
                    DType::Bool => Value::new(format!("({raw} != 0u)"), Repr::Bool),
                    DType::I8 | DType::I16 => {
                        let left = 32 - bits;
                        Value::new(format!("(int_of({raw} << {left}u) >> {left}u)"), Repr::I32)
                    }
                    _ => Value::new(raw, Repr::U32),
                }
            }
        })
    }

    /// Writes an element of a buffer. The value has the type in which elements are computed.
    pub(crate) fn store(&mut self, id: BufferId, at: &str, value: &Value) -> Result<(), String> {
        let dtype = self.regions.program.buffer(id).dtype;
        let value = self.as_repr(value, repr_of(Type::of(dtype)));
        let (binding, base) = self.buffer(id);
        let at = if base == 0 { at.to_owned() } else { format!("{base} + {at}") };
        let text = &value.text;
        if dtype.size() < 4 {
            let place = self.define(Value::new(at, Repr::I32)).text;
            let bits = 8 * dtype.size();
            let (shift, part) = if bits == 8 { (2, 3) } else { (1, 1) };
            let raw = match dtype {
                DType::F16 => format!("f16_of_f32({text})"),
                DType::BF16 => format!("bf16_of_f32({text})"),
                DType::Bool => self.select(text, "1u", "0u"),
                DType::I8 | DType::I16 => format!("bits_of_int({text})"),
                _ => text.clone(),
            };
            let by = self.define(Value::new(format!("bits_of_int({place} & {part}) * {bits}u"), Repr::U32));
            let mask = format!("{}u << {}", (1u32 << bits) - 1, by.text);
            let raw = format!("({raw}) << {}", by.text);
            let line = self.dialect.set_bits(&binding, &format!("{place} >> {shift}u"), &mask, &raw);
            self.line(&line);
            return Ok(());
        }
        let lines = match value.repr {
            Repr::F32 => vec![self.dialect.set_word(&binding, &at, &format!("bits_of({text})"))],
            Repr::I32 => vec![self.dialect.set_word(&binding, &at, &format!("bits_of_int({text})"))],
            Repr::U32 => vec![self.dialect.set_word(&binding, &at, text)],
            Repr::I64 | Repr::U64 | Repr::F64 => {
                let value = self.define(value.clone()).text;
                let at = self.define(Value::new(format!("2 * ({at})"), Repr::I32)).text;
                vec![
                    self.dialect.set_word(&binding, &at, &format!("low({value})")),
                    self.dialect.set_word(&binding, &format!("{at} + 1"), &format!("high({value})")),
                ]
            }
            Repr::Bool => unreachable!("truth values are stored as bytes"),
        };
        lines.iter().for_each(|line| self.line(line));
        Ok(())
    }

    /// A value as another type: as [`ortrain_expr::Inst::Convert`] does it.
    pub(crate) fn as_repr(&self, value: &Value, to: Repr) -> Value {
        let text = &value.text;
        if value.repr == to {
            return value.clone();
        }
        let converted = match (value.repr, to) {
            (Repr::F64, _) | (_, Repr::F64) => self.as_double(value, to),
            (Repr::Bool, Repr::F32) => self.select(text, "1.0f", "0.0f"),
            (Repr::Bool, Repr::I32) => self.select(text, "1i", "0i"),
            (Repr::Bool, Repr::U32) => self.select(text, "1u", "0u"),
            (Repr::Bool, Repr::I64 | Repr::U64) => format!("pair_of_u32({})", self.select(text, "1u", "0u")),
            (Repr::F32, Repr::Bool) => format!("is_not_zero({text})"),
            (Repr::I32, Repr::Bool) => format!("({text} != 0i)"),
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

    /// The text of a value as a 64-bit float, or that of a 64-bit float as another type.
    fn as_double(&self, Value { text, repr }: &Value, to: Repr) -> String {
        match (repr, to) {
            (Repr::Bool, _) => self.select(text, "pair(0u, 1072693248u)", "pair(0u, 0u)"),
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
            (Repr::F64, Repr::F64) => text.clone(),
        }
    }

    /// A scalar of the run: the seed (0) or the number of train steps (1).
    pub(crate) fn run_scalar(&mut self, number: usize) -> Value {
        let run = self.binding(Source::Run, false);
        let words = [2 * number, 2 * number + 1].map(|at| self.dialect.word(&run, &at.to_string()));
        Value::new(format!("pair({}, {})", words[0], words[1]), Repr::U64)
    }

    /// A word of a table.
    pub(crate) fn table(&mut self, words: &Arc<[u32]>, at: &str) -> Value {
        let table = self.binding(Source::Table(words.clone()), false);
        Value::new(format!("int_of({})", self.dialect.word(&table, at)), Repr::I32)
    }

    /// A number that an earlier launch of the instruction has left.
    pub(crate) fn scratch(&mut self, at: &str) -> Value {
        let scratch = self.binding(Source::Scratch, false);
        Value::new(format!("float_of({})", self.dialect.word(&scratch, at)), Repr::F32)
    }

    /// Leaves a number for a later launch of the instruction.
    pub(crate) fn set_scratch(&mut self, at: &str, value: &Value) {
        let scratch = self.binding(Source::Scratch, false);
        let line = self.dialect.set_word(&scratch, at, &format!("bits_of({})", value.text));
        self.line(&line);
    }

    /// A word of the fault.
    pub(crate) fn fault_word(&mut self, at: usize) -> String {
        let fault = self.binding(Source::Fault, true);
        self.dialect.word(&fault, &at.to_string())
    }

    pub(crate) fn set_fault_word(&mut self, at: usize, value: &str) {
        let fault = self.binding(Source::Fault, true);
        let line = self.dialect.set_word(&fault, &at.to_string(), value);
        self.line(&line);
    }

    pub(crate) fn lower_fault_word(&mut self, at: usize, value: &str) {
        let fault = self.binding(Source::Fault, true);
        let line = self.dialect.lower_word(&fault, &at.to_string(), value);
        self.line(&line);
    }

    /// The launch, of one invocation per point. `scratch` is how many bytes launches of the instruction share.
    pub(crate) fn finish(
        mut self,
        points: u64,
        instruction: usize,
        scratch: usize,
    ) -> Result<Launch, String> {
        self.close_to(0);
        if self.sources.len() > self.caps.bindings as usize {
            let (needed, most) = (self.sources.len(), self.caps.bindings);
            return Err(format!(
                "it reaches {needed} separate pieces of memory, and this device binds at most {most}"
            ));
        }
        let groups = points.div_ceil(u64::from(GROUP)).max(1);
        let row = groups.min(u64::from(self.caps.groups)) as u32;
        let column = groups.div_ceil(u64::from(row));
        if points > u64::from(u32::MAX) - u64::from(GROUP) || column > u64::from(self.caps.groups) {
            return Err(format!("it has {points} points, which are more than invocations are counted"));
        }
        let binding = |source: Source| match source {
            Source::Region(k) => {
                let Region { home, start, end, .. } = self.regions.regions[k];
                Binding::Bytes { home, start, len: end - start }
            }
            Source::Scratch => Binding::Bytes { home: Home::Scratch, start: 0, len: align(scratch) },
            Source::Run => Binding::Run,
            Source::Fault => Binding::Fault,
            Source::Table(words) => Binding::Table(words),
        };
        Ok(Launch {
            source: self.dialect.kernel(&self.declared, &self.body, points, row).into(),
            groups: [row, column as u32, 1],
            bindings: self.sources.into_iter().map(binding).collect(),
            instruction: instruction as u32,
        })
    }
}

/// The reason why an instruction is not computed with 64-bit floats.
pub(crate) fn float64() -> String {
    "it computes with float64, which this device does not have; float32 is there, and the cpu backend has both".into()
}
