//! Profile of a step: the time of each instruction.

use std::fmt::{self, Write as _};
use std::path::Path;
use std::time::{Duration, Instant};

use ortrain_files::Staged;
use ortrain_onnx::OnnxError;
use ortrain_program::Limits;
use ortrain_program::{Copied, Executable, MemoryNeed, Observer, Precision, Program};
use rustc_hash::FxHashMap;

use crate::{Error, Result};

/// Options of a profile.
///
/// ```
/// use ortrain::ProfileOptions;
///
/// let options = ProfileOptions::default().warmup(3).steps(20).training(false);
/// assert_eq!((options.warmup, options.steps, options.training), (3, 20, false));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ProfileOptions {
    /// Number of timed steps.
    pub steps: usize,
    /// Number of warm-up steps before them.
    pub warmup: usize,
    /// True to profile training steps, false for steps of the evaluation model.
    pub training: bool,
}

impl Default for ProfileOptions {
    fn default() -> ProfileOptions {
        ProfileOptions { steps: 10, warmup: 1, training: true }
    }
}

impl ProfileOptions {
    /// Sets the number of timed steps, at least one.
    #[must_use]
    pub fn steps(mut self, steps: usize) -> ProfileOptions {
        self.steps = steps.max(1);
        self
    }

    /// Sets the number of warm-up steps.
    #[must_use]
    pub fn warmup(mut self, steps: usize) -> ProfileOptions {
        self.warmup = steps;
        self
    }

    /// Selects training steps, or steps of the evaluation model.
    #[must_use]
    pub fn training(mut self, training: bool) -> ProfileOptions {
        self.training = training;
        self
    }
}

/// Measurements of one instruction of a program, of a function on the host, or of a copy of inputs or
/// results.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, mut module, mut optimizer) = setup::training()?;
/// # let batch = setup::batch();
/// # let inputs = batch.each_ref().map(ortrain::InputView::from);
/// let profile = module.profile(&state, &inputs, Default::default(), &mut |_, _| Ok(()))?;
/// let products = profile.instructions.iter().filter(|instruction| instruction.kind == "MatMul");
/// for instruction in products {
///     assert!(instruction.flops > 0 && instruction.min <= instruction.median);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct InstructionProfile {
    /// Node of the instruction, as messages name it.
    pub node: String,
    /// Kind of instruction, or `Host`, `Inputs`, `Outputs`.
    pub kind: &'static str,
    /// Sizes of its operands.
    pub shapes: String,
    /// Kernel that the backend selected, or the library that computes it; empty if the backend does not say.
    pub kernel: String,
    /// Number of calls in all steps.
    pub calls: usize,
    /// Total time of all calls.
    pub total: Duration,
    /// Time of the fastest call.
    pub min: Duration,
    /// Median time of a call.
    pub median: Duration,
    /// Floating-point operations of a call.
    pub flops: u64,
    /// Minimum bytes that a call moves.
    pub bytes: u64,
    /// Minimum time of a call on this machine: the longer of computing and of moving data. bfloat16 products
    /// have their own peak rate.
    pub bound: Duration,
}

impl InstructionProfile {
    /// Returns the ratio of the bound to the median time: 1 is the bound. It may exceed 1 if buffers remain
    /// in a cache.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.bound.as_secs_f64() / self.median.as_secs_f64().max(1e-9)
    }
}

/// Profile of some steps, by instruction.
///
/// The text of a profile is a table, sorted by descending time:
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, mut module, mut optimizer) = setup::training()?;
/// # let batch = setup::batch();
/// # let inputs = batch.each_ref().map(ortrain::InputView::from);
/// let profile = module.profile(&state, &inputs, Default::default(), &mut |_, _| Ok(()))?;
/// assert!(profile.to_string().contains("MatMul"));
/// assert_eq!(profile.memory, module.memory_need(&inputs, true)?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Profile {
    /// Measurements in the order of the first step.
    pub instructions: Vec<InstructionProfile>,
    /// Time of each step.
    pub steps: Vec<Duration>,
    /// Performance limits of the machine, measured after the steps.
    pub limits: Limits,
    /// Memory need of a step.
    pub memory: MemoryNeed,
    /// Time to plan for inputs of new shapes, by parts in order: shapes and lowering, the passes by name, and
    /// kernels. The first step with larger inputs additionally allocates memory.
    pub planning: Vec<(&'static str, Duration)>,
    /// Precision of inner products.
    pub precision: Precision,
    /// Unit that multiplies bfloat16: see [`Module::bf16_unit`](crate::Module::bf16_unit).
    pub bf16_unit: Option<&'static str>,
    events: Vec<Event>,
}

/// One call.
#[derive(Clone, Copy, Debug)]
struct Event {
    /// Index of the instruction; `None` for a complete step.
    row: Option<usize>,
    start: Duration,
    time: Duration,
}

#[derive(PartialEq, Eq, Hash)]
enum EventKey {
    /// Program (by address, which is stable while the module exists) and instruction.
    Instruction(usize, usize),
    Host(String),
    Copied(Copied, usize),
}

#[derive(Debug)]
struct InstructionRecord {
    node: String,
    kind: &'static str,
    shapes: String,
    kernel: String,
    precision: Precision,
    flops: u64,
    bytes: u64,
    calls: Vec<Duration>,
}

/// Precision and unit of inner products.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ProductMode {
    pub(crate) precision: Precision,
    pub(crate) bf16_unit: Option<&'static str>,
}

/// Kernels of programs, by the addresses of the programs.
#[derive(Debug, Default)]
pub(crate) struct Kernels(FxHashMap<usize, Vec<String>>);

impl Kernels {
    /// Remembers the kernels of an executable.
    pub(crate) fn add(&mut self, executable: &dyn Executable) {
        let address = std::ptr::from_ref(executable.program()) as usize;
        self.0.entry(address).or_insert_with(|| executable.kernels());
    }

    /// Returns the kernel of an instruction; an empty text if the backend does not say.
    pub(crate) fn of(&self, program: &Program, index: usize) -> String {
        let kernels = self.0.get(&(std::ptr::from_ref(program) as usize));
        kernels.and_then(|kernels| kernels.get(index)).cloned().unwrap_or_default()
    }
}

/// Recorder of the events of steps.
pub(crate) struct Collector {
    kernels: Kernels,
    keys: FxHashMap<EventKey, usize>,
    rows: Vec<InstructionRecord>,
    events: Vec<Event>,
    steps: Vec<Duration>,
    origin: Instant,
}

impl Collector {
    pub(crate) fn new() -> Collector {
        Collector {
            kernels: Kernels::default(),
            keys: FxHashMap::default(),
            rows: Vec::new(),
            events: Vec::new(),
            steps: Vec::new(),
            origin: Instant::now(),
        }
    }

    fn add(&mut self, key: EventKey, start: Instant, end: Instant, row: impl FnOnce() -> InstructionRecord) {
        let at = *self.keys.entry(key).or_insert_with(|| {
            self.rows.push(row());
            self.rows.len() - 1
        });
        let time = end - start;
        self.rows[at].calls.push(time);
        self.events.push(Event { row: Some(at), start: start - self.origin, time });
    }

    /// Records the end of a step.
    pub(crate) fn step(&mut self, start: Instant, end: Instant) {
        self.steps.push(end - start);
        self.events.push(Event { row: None, start: start - self.origin, time: end - start });
    }

    pub(crate) fn finish(
        self,
        limits: Limits,
        memory: MemoryNeed,
        planning: Vec<(&'static str, Duration)>,
        products: ProductMode,
    ) -> Profile {
        let bound = |row: &InstructionRecord| {
            // A product of factors that are split into several terms consists of several products.
            let flops = match row.precision {
                Precision::F32 => row.flops as f64,
                precision => {
                    row.flops as f64
                        * precision.products().len() as f64
                        * (limits.flops / limits.product_flops)
                }
            };
            Duration::from_secs_f64(limits.seconds(flops, row.bytes as f64))
        };
        let finished = |row: InstructionRecord| {
            let bound = bound(&row);
            let mut times = row.calls;
            times.sort_unstable();
            let calls = times.len();
            InstructionProfile {
                node: row.node,
                kind: row.kind,
                shapes: row.shapes,
                kernel: row.kernel,
                calls,
                total: times.iter().sum(),
                min: times.first().copied().unwrap_or_default(),
                median: times.get(calls / 2).copied().unwrap_or_default(),
                flops: row.flops,
                bytes: row.bytes,
                bound,
            }
        };
        Profile {
            instructions: self.rows.into_iter().map(finished).collect(),
            steps: self.steps,
            limits,
            memory,
            planning,
            precision: products.precision,
            bf16_unit: products.bf16_unit,
            events: self.events,
        }
    }
}

impl Observer for Collector {
    fn begins(&mut self, executable: &dyn Executable) {
        self.kernels.add(executable);
    }

    fn instruction(&mut self, program: &Program, index: usize, start: Instant, end: Instant) {
        let key = EventKey::Instruction(std::ptr::from_ref(program) as usize, index);
        let kernels = std::mem::take(&mut self.kernels);
        self.add(key, start, end, || {
            let scheduled = &program.instructions[index];
            let cost = scheduled.instruction.cost(program);
            InstructionRecord {
                node: scheduled.node.to_string(),
                kind: scheduled.instruction.name(),
                shapes: scheduled.instruction.describe_sizes(),
                kernel: kernels.of(program, index),
                precision: scheduled.instruction.precision(),
                flops: cost.flops,
                bytes: cost.bytes,
                calls: Vec::new(),
            }
        });
        self.kernels = kernels;
    }

    fn host(&mut self, node: &str, start: Instant, end: Instant) {
        let row = || InstructionRecord {
            node: node.to_owned(),
            kind: "Host",
            shapes: String::new(),
            kernel: String::new(),
            precision: Precision::F32,
            flops: 0,
            bytes: 0,
            calls: Vec::new(),
        };
        self.add(EventKey::Host(node.to_owned()), start, end, row);
    }

    fn copied(&mut self, direction: Copied, bytes: usize, start: Instant, end: Instant) {
        let (kind, node) = match direction {
            Copied::Inputs => ("Inputs", "copied into the arena"),
            Copied::Outputs => ("Outputs", "copied out of the arena"),
        };
        let row = || InstructionRecord {
            node: node.to_owned(),
            kind,
            shapes: format!("{bytes} bytes"),
            kernel: String::new(),
            precision: Precision::F32,
            flops: 0,
            // Both read and written.
            bytes: 2 * bytes as u64,
            calls: Vec::new(),
        };
        self.add(EventKey::Copied(direction, bytes), start, end, row);
    }
}

impl Profile {
    /// Returns the median time of a step.
    #[must_use]
    pub fn step_time(&self) -> Duration {
        let mut steps = self.steps.clone();
        steps.sort_unstable();
        steps.get(steps.len() / 2).copied().unwrap_or_default()
    }

    /// Returns the total time of all instructions.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.instructions.iter().map(|instruction| instruction.total).sum()
    }

    /// Returns the minimum time of the steps on this machine, for sequential instructions.
    #[must_use]
    pub fn bound(&self) -> Duration {
        self.instructions
            .iter()
            .map(|i| i.bound.saturating_mul(u32::try_from(i.calls).unwrap_or(u32::MAX)))
            .sum()
    }

    /// Returns the calls in the Chrome trace format, for `chrome://tracing` and Perfetto.
    #[must_use]
    pub fn chrome_trace_json(&self) -> String {
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        let mut out = String::from("{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
        out.push_str(
            "\n{\"ph\":\"M\",\"pid\":1,\"tid\":1,\"name\":\"process_name\",\"args\":{\"name\":\"ortrain\"}}",
        );
        let mut step = 0;
        for event in &self.events {
            let (ts, dur) = (micros(event.start), micros(event.time));
            let _ = write!(out, ",\n{{\"ph\":\"X\",\"pid\":1,\"ts\":{ts:.3},\"dur\":{dur:.3},");
            match event.row.map(|row| &self.instructions[row]) {
                None => {
                    let _ = write!(out, "\"tid\":0,\"cat\":\"step\",\"name\":\"step {step}\"}}");
                    step += 1;
                }
                Some(i) => {
                    let [kind, node, shapes, kernel] =
                        [i.kind, &i.node, &i.shapes, &i.kernel].map(to_json_string);
                    let share = i.bound.as_secs_f64() / event.time.as_secs_f64().max(1e-9);
                    let _ = write!(
                        out,
                        "\"tid\":1,\"cat\":{kind},\"name\":{},\"args\":{{\"node\":{node},\"shapes\":{shapes},\"kernel\":{kernel},\
                         \"flops\":{},\"bytes\":{},\"share_of_bound\":{share:.4}}}}}",
                        to_json_string(&format!("{} {}", i.kind, i.node)),
                        i.flops,
                        i.bytes,
                    );
                }
            }
        }
        out.push_str("\n]}\n");
        out
    }

    /// Writes [`Profile::chrome_trace_json`] to a file.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// # let folder = tempfile::tempdir()?;
    /// let profile = module.profile(&state, &inputs, Default::default(), &mut |_, _| Ok(()))?;
    /// profile.chrome_trace(folder.path().join("step.json"))?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn chrome_trace(&self, path: impl AsRef<Path>) -> Result<()> {
        let write = || {
            let mut file = Staged::beside(path.as_ref())?;
            file.append(self.chrome_trace_json().as_bytes())?;
            file.sync()?;
            file.persist()
        };
        write().map_err(|error| Error::Onnx(OnnxError::from(error)))
    }
}

/// Encodes a text as a JSON string.
pub(crate) fn to_json_string(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 2);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            c if c < ' ' => {
                let _ = write!(out, "\\u{:04x}", c as u32);
            }
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

/// Parts of planning below this fraction (one in `MIN_PART_DIVISOR`) of the total time are not printed.
const MIN_PART_DIVISOR: u32 = 50;

/// Table, sorted by descending time.
impl fmt::Display for Profile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let millis = |time: Duration| time.as_secs_f64() * 1e3;
        let steps = self.steps.len().max(1) as f64;
        let sum = self.total().as_secs_f64().max(1e-12);
        let products = match (self.precision, self.bf16_unit) {
            (Precision::F32, _) => String::new(),
            (precision, None) => format!("; inner products in {precision}"),
            (precision, Some(unit)) => format!("; inner products in {precision} by {unit}"),
        };
        writeln!(
            f,
            "{} steps of {:.3} ms; machine: {:.1} GFLOP/s, {:.1} GB/s; memory of a step: {} bytes{products}",
            self.steps.len(),
            millis(self.step_time()),
            self.limits.flops / 1e9,
            self.limits.bandwidth / 1e9,
            self.memory.total(),
        )?;
        writeln!(
            f,
            "{:>9} {:>6} {:>6} {:>11} {:>11} {:>9} {:>9} {:>6}  {:10}  shapes  # node  | kernel",
            "ms/step", "time", "calls", "median us", "min us", "MFLOP", "MB", "bound", "kind"
        )?;
        let mut order: Vec<&InstructionProfile> = self.instructions.iter().collect();
        order.sort_by_key(|instruction| std::cmp::Reverse(instruction.total));
        for i in order {
            writeln!(
                f,
                "{:9.3} {:5.1}% {:6} {:11.1} {:11.1} {:9.2} {:9.3} {:5.0}%  {:10}  {}  # {}{}{}",
                millis(i.total) / steps,
                100.0 * i.total.as_secs_f64() / sum,
                i.calls,
                millis(i.median) * 1e3,
                millis(i.min) * 1e3,
                i.flops as f64 / 1e6,
                i.bytes as f64 / 1e6,
                100.0 * i.share(),
                i.kind,
                i.shapes,
                i.node,
                if i.kernel.is_empty() { "" } else { "  | " },
                i.kernel,
            )?;
        }
        let per_step = |value: fn(&InstructionProfile) -> u64| {
            let all = self.instructions.iter().map(|i| value(i) as f64 * i.calls as f64);
            all.sum::<f64>() / steps / 1e6
        };
        let calls: usize = self.instructions.iter().map(|i| i.calls).sum();
        writeln!(
            f,
            "{:9.3} {:5.1}% {:6} {:>11} {:>11} {:9.2} {:9.3} {:5.0}%  all",
            sum * 1e3 / steps,
            100.0,
            calls,
            "",
            "",
            per_step(|i| i.flops),
            per_step(|i| i.bytes),
            100.0 * self.bound().as_secs_f64() / sum,
        )?;
        let planning: Duration = self.planning.iter().map(|(_, time)| time).sum();
        let parts =
            self.planning.iter().filter(|(_, time)| time.saturating_mul(MIN_PART_DIVISOR) >= planning);
        let parts: Vec<String> = parts.map(|(name, time)| format!("{name} {:.3}", millis(*time))).collect();
        writeln!(f, "{:9.3} ms to plan for new shapes: {}", millis(planning), parts.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_escaped() {
        assert_eq!(to_json_string("a \"b\"\\\n\u{1}é"), r#""a \"b\"\\\u000a\u0001é""#);
    }
}
