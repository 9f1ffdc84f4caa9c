//! Advice for a run that exceeds `memory_limit`: a sufficient limit, and the largest batch.

use ortrain_program::{InputView, RunError, Workspace};

use crate::Error;
use crate::exec::executable_cache::ExecutableCache;
use crate::exec::inputs::Signature;

/// Maximum number of trial limits: plans converge after a few.
const MAX_TRIAL_LIMITS: usize = 8;
/// Maximum bytes of a run that is planned for advice: the time to prepare kernels depends on their sizes.
const MAX_PLANNED_BYTES: usize = 1 << 36;

/// Adds advice to a memory-limit error of a run: a sufficient limit, and the largest batch for the limit of
/// `work`.
///
/// Later parts of some runs are known only after the earlier parts have run. For such a run, the advice is a
/// lower bound.
pub(crate) fn explain(
    error: Error,
    runners: &ExecutableCache,
    signature: &Signature,
    work: &Workspace,
    inputs: &[InputView<'_>],
) -> Error {
    let Error::Run(RunError::OverLimit(over)) = &error else { return error };
    let plan = |work: &Workspace, batch: Option<usize>| {
        let dims: Vec<Vec<usize>> = match batch {
            Some(size) => signature.shapes_with_batch(inputs, size),
            None => inputs.iter().map(|value| value.dims.to_vec()).collect(),
        };
        let dims: Vec<&[usize]> = dims.iter().map(Vec::as_slice).collect();
        runners.plan(work, &dims)
    };
    let with_help = |help: String| Error::StepOverLimit { over: over.clone(), help };
    match runners.schedule(inputs) {
        Ok(schedule) if schedule.single_program().is_none() => {
            return with_help(format!("memory_limit must be at least {}", over.need.total()));
        }
        _ => {}
    }
    let mut help = Vec::new();
    // The need depends on the limit: values are recomputed, and kernels use less scratch.
    let mut enough = over.need.total();
    for _ in 0..MAX_TRIAL_LIMITS {
        if enough > MAX_PLANNED_BYTES {
            break;
        }
        match plan(&Workspace::with_limit(work.backend().clone(), Some(enough), over.need.state), None) {
            // The scratch of kernels is known after they are prepared.
            Ok((_, need)) if need.total() > enough => enough = need.total(),
            Ok(_) => {
                help.push(format!("memory_limit = {enough} is enough"));
                break;
            }
            Err(Error::Run(RunError::OverLimit(next))) => enough = next.need.total().max(enough + 1),
            Err(_) => break,
        }
    }
    if let Some(batch) = signature.batch_size(inputs) {
        // Binary search: the largest batch that fits is at least `fitting` (0: unknown) and less than `failing`.
        let (mut fitting, mut failing) = (0, batch);
        while over.need.state + over.need.constants < over.limit && failing - fitting > 1 {
            let size = fitting + (failing - fitting) / 2;
            let fits = plan(work, Some(size)).is_ok_and(|(_, need)| need.total() <= over.limit);
            if fits { fitting = size } else { failing = size }
        }
        help.push(match fitting {
            0 => "even a batch of 1 exceeds the limit".to_owned(),
            size => format!("within the limit a batch of {size} fits"),
        });
    }
    if help.is_empty() {
        return error;
    }
    with_help(help.join("; "))
}
