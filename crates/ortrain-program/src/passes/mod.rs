//! Passes from the lowered program to the executable program, in order of execution. Each pass has its own file.
//!
//! A pass rewrites the whole draft, which computes the same results afterwards. Builds with debug assertions validate
//! the draft after every pass, other builds once after the last pass. [`PassLog`] records the effect of each pass.

mod batch_tiling;
mod changed;
mod choose_precision;
mod compact_pool_indices;
mod dead_elements;
mod fallible_first;
mod fuse_attention;
mod fusion;
mod horizontal_fusion;
mod inline_constants;
mod mask_packing;
pub(crate) mod memory_plan;
mod precompute_derivatives;
mod rematerialization;
mod remove_unused;
mod sink_scatter_add;
#[cfg(test)]
mod snapshots;
mod weight_prepacking;

pub(crate) use changed::{Changed, Outcome};

pub(crate) use crate::draft::Draft;
pub(crate) use crate::target::Target;

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use ortrain_expr::pause;

use crate::error::ProgramError;

/// Function of a pass: rewrites a draft for a target.
type PassFunction = fn(&mut Draft, &Target) -> Outcome;

/// Named rewrite of a program.
#[derive(Clone, Copy)]
pub struct Pass {
    /// Name in dumps and in the environment variable `ORTRAIN_PASSES`.
    pub name: &'static str,
    /// Description in dumps: a verb in the third person.
    pub about: &'static str,
    /// True if programs also run without the pass.
    pub is_optional: bool,
    run: PassFunction,
}

impl std::fmt::Debug for Pass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pass").field("name", &self.name).finish_non_exhaustive()
    }
}

/// All passes, in order of execution.
pub const PASSES: &[Pass] = &[
    required("remove_unused", "removes unused instructions and results", remove_unused::run),
    optional(
        "inline_constants",
        "replaces loads of one-element constants with their values",
        inline_constants::run,
    ),
    optional(
        "dead_elements",
        "narrows instructions to elements that are read and not zero",
        dead_elements::run,
    ),
    optional(
        "compact_pool_indices",
        "stores the maxima's positions as indices into their windows",
        compact_pool_indices::run,
    ),
    optional("sink_scatter_add", "moves scatter-adds after the maps that read them", sink_scatter_add::run),
    optional("fuse_attention", "fuses products and a softmax into one attention", fuse_attention::run),
    optional("fuse_chains", "fuses chains of element-wise maps into one map", fusion::fuse_chains),
    optional(
        "precompute_derivatives",
        "saves derivatives for the backward pass instead of their operands",
        precompute_derivatives::run,
    ),
    optional(
        "fusion",
        "fuses maps into the producers of their operands and the consumers of their results",
        fusion::run,
    ),
    required("choose_precision", "chooses the precision of the products", choose_precision::run),
    optional(
        "weight_prepacking",
        "packs matrices into panels for products with few rows",
        weight_prepacking::run,
    ),
    required(
        "fallible_first",
        "moves instructions that can fail before those that write state",
        fallible_first::run,
    ),
    optional("mask_packing", "packs boolean masks into bits at the memory peak", mask_packing::run),
    optional("batch_tiling", "runs pairs of convolutions on parts of the batch", batch_tiling::run),
    optional(
        "horizontal_fusion",
        "joins equal, independent nests into one instruction",
        horizontal_fusion::run,
    ),
    required("memory_plan", "assigns arena offsets to the work buffers", memory_plan::run),
];

/// Name of the stage before the first pass, for [`PassLog::with_text_after`]: the program as the operators lower it.
pub const LOWERED: &str = "lowered";

const fn required(name: &'static str, about: &'static str, run: PassFunction) -> Pass {
    Pass { name, about, is_optional: false, run }
}

const fn optional(name: &'static str, about: &'static str, run: PassFunction) -> Pass {
    Pass { is_optional: true, ..required(name, about, run) }
}

/// Effect of one pass on one program.
#[derive(Clone, Debug)]
pub struct PassRecord {
    /// Name of the pass.
    pub pass: &'static str,
    /// Number of changes.
    pub changes: usize,
    /// Number of instructions after the pass.
    pub instructions: usize,
    /// Duration of the pass.
    pub elapsed: Duration,
    /// Text of the program after the pass, if requested.
    pub text: Option<String>,
}

/// Log of the effect of each pass on each compiled program. Clones share the log.
#[derive(Clone, Debug, Default)]
pub struct PassLog {
    stage: Option<&'static str>,
    programs: Arc<Mutex<Vec<Vec<PassRecord>>>>,
}

impl PassLog {
    /// Creates an empty log.
    #[must_use]
    pub fn new() -> PassLog {
        PassLog::default()
    }

    /// Creates a log that also records the text of programs after a pass, or before all passes for [`LOWERED`].
    /// Returns `None` if no pass has that name.
    #[must_use]
    pub fn with_text_after(stage: &str) -> Option<PassLog> {
        let names = PASSES.iter().map(|pass| pass.name).chain([LOWERED]);
        let stage = names.into_iter().find(|&name| name == stage)?;
        Some(PassLog { stage: Some(stage), ..PassLog::default() })
    }

    /// Returns the effect of each pass for each program, in the order of compilation.
    #[must_use]
    pub fn programs(&self) -> Vec<Vec<PassRecord>> {
        self.programs.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn add(&self, records: Vec<PassRecord>) {
        self.programs.lock().unwrap_or_else(PoisonError::into_inner).push(records);
    }
}

/// Environment variable that disables passes: their names with a `-` prefix, separated by commas.
const PASSES_VARIABLE: &str = "ORTRAIN_PASSES";

/// Returns the passes that the environment disables.
fn disabled_passes() -> Result<&'static [&'static str], ProgramError> {
    static DISABLED: OnceLock<Result<Vec<&'static str>, ProgramError>> = OnceLock::new();
    let disabled = DISABLED
        .get_or_init(|| std::env::var(PASSES_VARIABLE).map_or(Ok(Vec::new()), |text| parse_disabled(&text)));
    disabled.as_deref().map_err(Clone::clone)
}

/// Parses a list of disabled passes.
fn parse_disabled(text: &str) -> Result<Vec<&'static str>, ProgramError> {
    let names = text.split(',').map(str::trim).filter(|name| !name.is_empty());
    let known = |name: &str| {
        let pass = name.strip_prefix('-').and_then(|name| PASSES.iter().find(|pass| pass.name == name));
        pass.filter(|pass| pass.is_optional).map(|pass| pass.name)
    };
    let unknown = |name: &str| {
        let optional = PASSES.iter().filter(|pass| pass.is_optional);
        let known = optional.map(|pass| format!("-{}", pass.name)).collect::<Vec<_>>().join(", ");
        ProgramError::UnknownPass { name: name.to_owned(), known }
    };
    names.map(|name| known(name).ok_or_else(|| unknown(name))).collect()
}

/// Runs all enabled passes, or only the required ones if `is_fused` is false.
///
/// Backends trust programs: a bug in a pass must not cause an access outside of buffers. The result is therefore
/// checked. If it is invalid, the passes run again with a check after each, to name the faulty pass.
///
/// # Errors
/// The errors of a pass, and [`ProgramError::InvalidPass`] if a pass produces an invalid program.
pub(crate) fn run(
    draft: Draft,
    target: &Target,
    is_fused: bool,
    log: Option<&PassLog>,
) -> Result<Draft, ProgramError> {
    let left_out = disabled_passes()?;
    let is_enabled = |pass: &&Pass| !pass.is_optional || is_fused && !left_out.contains(&pass.name);
    let passes: Vec<&Pass> = PASSES.iter().filter(is_enabled).collect();
    run_all(&passes, draft, target, cfg!(debug_assertions), log)
}

/// Runs passes, with a check after the last one. If `checks_each` is true, also checks after each pass that reports
/// changes.
fn run_all(
    passes: &[&Pass],
    mut draft: Draft,
    target: &Target,
    checks_each: bool,
    log: Option<&PassLog>,
) -> Result<Draft, ProgramError> {
    let invalid =
        |pass: &Pass, source| ProgramError::InvalidPass { pass: pass.name, source: Box::new(source) };
    let original = (!checks_each).then(|| draft.clone());
    let mut records = Vec::new();
    if log.is_some_and(|log| log.stage == Some(LOWERED)) {
        let (instructions, text) = (draft.instructions.len(), Some(draft.to_string()));
        records.push(PassRecord { pass: LOWERED, changes: 0, instructions, elapsed: Duration::ZERO, text });
    }
    for pass in passes {
        pause();
        let start = Instant::now();
        let Changed(changes) = (pass.run)(&mut draft, target)?;
        let elapsed = start.elapsed();
        if checks_each && changes > 0 {
            draft.check().map_err(|source| invalid(pass, source))?;
        }
        if let Some(log) = log {
            let text = (log.stage == Some(pass.name)).then(|| draft.to_string());
            let instructions = draft.instructions.len();
            records.push(PassRecord { pass: pass.name, changes, instructions, elapsed, text });
        }
    }
    if let (Err(source), Some(last)) = (draft.check(), passes.last()) {
        // Passes without reported changes are not checked, so the faulty pass can be unknown. The error then names the
        // last pass.
        let outcome = original.map(|original| run_all(passes, original, target, true, None).map(drop));
        return Err(outcome.and_then(Result::err).unwrap_or_else(|| invalid(last, source)));
    }
    if let Some(log) = log {
        log.add(records);
    }
    Ok(draft)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use ortrain_expr::{Builder, DType, Precision, Type};

    use super::*;
    use crate::versions::Versions;
    use crate::{
        Buffer, BufferId, BufferLocation, GradientModes, Instruction, Load, Nest, Operand,
        ScheduledInstruction,
    };

    const N: usize = 8;

    /// Builds a program that copies a buffer.
    fn copy_program() -> Draft {
        let buffer = |label: &str| Buffer {
            label: label.into(),
            dtype: DType::F32,
            len: N,
            location: BufferLocation::Work(0),
        };
        let mut b = Builder::new();
        let x = b.load(0, Type::F32);
        let [from, to] = [0, 1].map(|id| Operand::contiguous(BufferId(id), DType::F32, &[N]));
        let nest = Nest {
            dims: [N].into_iter().collect(),
            inner: 0,
            segments: None,
            loads: vec![Load::Buffer(from)],
            expr: b.finish(&[x]),
            reductions: Vec::new(),
            stores: vec![to],
        };
        let (instruction, node): (_, Arc<str>) = (Instruction::from(nest), "node".into());
        let (gradient_modes, versions) = (GradientModes::ALL, Versions::default());
        let instructions = vec![ScheduledInstruction { instruction, gradient_modes, node, versions }];
        let ends = (vec![BufferId(0)], vec![BufferId(1)]);
        Draft::new(instructions, vec![buffer("x"), buffer("y")], Vec::new(), ends, Precision::F32)
    }

    /// Faulty pass: the copy stores past the end of its buffer.
    fn store_past_the_end(draft: &mut Draft, _: &Target) -> Result<Changed, ProgramError> {
        let nest = draft.instructions[0].instruction.nest_mut().expect("a copy");
        nest.dims[0] += 1;
        Ok(Changed(1))
    }

    /// Faulty pass: drops the copy.
    fn drop_the_copy(draft: &mut Draft, _: &Target) -> Result<Changed, ProgramError> {
        draft.instructions.clear();
        Ok(Changed(1))
    }

    fn change_nothing(_: &mut Draft, _: &Target) -> Result<Changed, ProgramError> {
        Ok(Changed(0))
    }

    /// A bug in a pass is found by the check after each pass and by the final check, and the error names the pass.
    #[test]
    fn invalid_pass_is_named() {
        let first = optional("first", "", change_nothing);
        let last = optional("last", "", change_nothing);
        let cases: [(PassFunction, &str); 2] = [
            (store_past_the_end, "elements 0..=8 of a buffer of 8"),
            (drop_the_copy, "would not have its last value"),
        ];
        for (invalid, fault) in cases {
            let pass = optional("wrong", "", invalid);
            for checks_each in [true, false] {
                let passes = [&first, &pass, &last];
                let outcome = run_all(&passes, copy_program(), &Target::CPU, checks_each, None);
                let error = outcome.map(drop).unwrap_err().to_string();
                assert!(error.starts_with("the pass wrong produced an invalid program: "), "{error}");
                assert!(error.contains(fault), "{error}");
            }
        }
        let sound = run_all(&[&first, &last], copy_program(), &Target::CPU, false, None);
        assert!(sound.is_ok());
    }

    /// A log contains the effect of each pass, and the text after the requested pass.
    #[test]
    fn log_records_each_pass() {
        let log = PassLog::with_text_after("remove_unused").expect("there is such a pass");
        run(copy_program(), &Target::CPU, true, Some(&log)).expect("a program");
        let [records] = &log.programs()[..] else { panic!("one program was made") };
        let names: Vec<&str> = records.iter().map(|record| record.pass).collect();
        assert_eq!(names, PASSES.iter().map(|pass| pass.name).collect::<Vec<_>>());
        let texts: Vec<&PassRecord> = records.iter().filter(|record| record.text.is_some()).collect();
        assert_eq!(texts.iter().map(|record| record.pass).collect::<Vec<_>>(), ["remove_unused"]);
        assert!(
            texts[0].text.as_deref().is_some_and(|text| text.starts_with("draft: 1 instructions, 2 buffers"))
        );
        assert!(PassLog::with_text_after("nothing").is_none());
    }

    #[test]
    fn pass_names_are_unique() {
        let mut names: Vec<&str> = PASSES.iter().map(|pass| pass.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), PASSES.len());
    }

    #[test]
    fn disabled_passes_are_parsed() {
        assert_eq!(parse_disabled(""), Ok(Vec::new()));
        assert_eq!(parse_disabled("-fusion, -mask_packing,"), Ok(vec!["fusion", "mask_packing"]));
        for names in ["fusion", "-fuse", "-memory_plan", "--fusion"] {
            let error = parse_disabled(names).unwrap_err().to_string();
            assert!(error.contains(&format!("{names:?}")) && error.contains("-fuse_attention"), "{error}");
        }
    }
}
