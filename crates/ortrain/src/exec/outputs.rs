//! Memory of the caller for the results of a step.

use std::sync::Arc;

use ortrain_graph::{DType, Tensor, byte_length};
use ortrain_program::{DeviceError, Memory, OutputSink, OutputView};

use super::caller_memory::{memory_span, spans_overlap};
use crate::{Error, Result, ValueInfo};

/// Copies the results of a step, an evaluation or a run into tensors.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, mut module, mut optimizer) = setup::training()?;
/// # let batch = setup::batch();
/// # let inputs = batch.each_ref().map(ortrain::InputView::from);
/// use ortrain::collect;
///
/// let results = collect(|deliver| module.train_step(&mut state, &inputs, deliver))?;
/// let loss = results[0].to_vec::<f32>()[0];
/// assert!(loss > 0.0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// The error of the step.
pub fn collect(step: impl FnOnce(&mut OutputSink<'_>) -> Result<()>) -> Result<Vec<Tensor>> {
    let mut results = Vec::new();
    step(&mut |_, value| {
        results.push(value.to_tensor()?);
        Ok(())
    })?;
    Ok(results)
}

/// Memory of the caller for one result: element type, shape, and a buffer for the elements.
///
/// ```
/// use ortrain::OutputTarget;
///
/// let mut loss = [0.0];
/// let target = OutputTarget::f32(&[], &mut loss);
/// assert!(target.dims.is_empty());
/// ```
///
/// Two results cannot share a slice, nor can a result and an input: the borrow checker rejects it.
///
/// ```compile_fail,E0499
/// # use ortrain::OutputTarget;
/// let mut room = [0.0; 2];
/// let both = [OutputTarget::f32(&[2], &mut room), OutputTarget::f32(&[2], &mut room)];
/// # drop(both);
/// ```
#[derive(Debug)]
pub struct OutputTarget<'a> {
    /// Element type of the result.
    pub dtype: DType,
    /// Shape of the result.
    pub dims: &'a [usize],
    /// Buffer for the elements, row-major.
    pub bytes: TargetBytes<'a>,
}

/// Buffer of an [`OutputTarget`].
///
/// ```
/// use std::sync::Arc;
///
/// use ortrain::{DType, Memory, OutputTarget, TargetBytes};
///
/// let memory = Arc::new(Memory::new(8));
/// let target = OutputTarget { dtype: DType::F32, dims: &[2], bytes: TargetBytes::Memory(&memory) };
/// # drop(target);
/// ```
#[derive(Debug)]
pub enum TargetBytes<'a> {
    /// Memory of this process with the size of the result. The run writes little-endian elements.
    Host(&'a mut [u8]),
    /// The first bytes of memory of this process or of a device. Others may read or write this memory between runs.
    Memory(&'a Arc<Memory>),
}

impl<'a> OutputTarget<'a> {
    /// Wraps a buffer for a float32 result.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// use ortrain::OutputTarget;
    ///
    /// let mut loss = [0.0];
    /// module.eval_step_into(&state, &inputs, &mut [OutputTarget::f32(&[], &mut loss)])?;
    /// assert!(loss[0] > 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn f32(dims: &'a [usize], elements: &'a mut [f32]) -> OutputTarget<'a> {
        let bytes = TargetBytes::Host(bytemuck::cast_slice_mut(elements));
        OutputTarget { dtype: DType::F32, dims, bytes }
    }

    /// Wraps a memory that others may read or write between runs.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use ortrain::{DType, Memory, OutputTarget};
    ///
    /// let memory = Arc::new(Memory::new(8));
    /// let target = OutputTarget::in_memory(DType::F32, &[2], &memory);
    /// assert_eq!(target.dims, [2]);
    /// ```
    #[must_use]
    pub fn in_memory(dtype: DType, dims: &'a [usize], memory: &'a Arc<Memory>) -> OutputTarget<'a> {
        OutputTarget { dtype, dims, bytes: TargetBytes::Memory(memory) }
    }

    /// Checks that the result has the type and shape of this target.
    pub(crate) fn check(&self, info: &ValueInfo, dtype: DType, dims: &[usize]) -> Result<()> {
        if self.dtype == dtype && self.dims == dims {
            return Ok(());
        }
        Err(self.mismatch_error(info, format!("{dtype}{dims:?}"), Some(dims.to_vec())))
    }

    /// Checks element type and size before the shape of the result is known.
    pub(crate) fn check_size(&self, info: &ValueInfo) -> Result<()> {
        if self.dtype != info.dtype {
            return Err(self.mismatch_error(info, info.to_string(), None));
        }
        let name = &info.name;
        let error = |reason: String| Err(Error::Argument(format!("the buffer of output {name:?}{reason}")));
        let bytes = match byte_length(self.dtype, self.dims) {
            Ok(bytes) => bytes,
            Err(reason) => return error(format!(": {reason}")),
        };
        let (fits, actual_bytes, is_read_only) = match &self.bytes {
            TargetBytes::Host(buffer) => (buffer.len() == bytes, buffer.len(), false),
            TargetBytes::Memory(memory) => (memory.len() >= bytes, memory.len(), memory.is_read_only()),
        };
        if !fits {
            let (dtype, dims) = (self.dtype, self.dims);
            return error(format!(
                " is declared as {dtype}{dims:?} ({bytes} bytes), but it has {actual_bytes} bytes"
            ));
        }
        if is_read_only {
            return error(": it is read-only; give a writable buffer".into());
        }
        Ok(())
    }

    fn mismatch_error(&self, info: &ValueInfo, expected: String, dims: Option<Vec<usize>>) -> Error {
        let actual = format!("{}{:?}", self.dtype, self.dims);
        Error::Output { name: info.name.clone(), expected, found: actual, dims }
    }

    /// Returns the address range of the result.
    pub(crate) fn span(&self) -> (usize, usize) {
        match &self.bytes {
            TargetBytes::Host(bytes) => (bytes.as_ptr().addr(), bytes.as_ptr().addr() + bytes.len()),
            TargetBytes::Memory(memory) => {
                memory_span(memory, byte_length(self.dtype, self.dims).unwrap_or(usize::MAX))
            }
        }
    }

    /// Copies a result of this type and shape.
    pub(crate) fn write(&mut self, value: OutputView<'_>) -> std::result::Result<(), DeviceError> {
        match &mut self.bytes {
            TargetBytes::Host(bytes) => value.copy_to(bytes),
            TargetBytes::Memory(memory) => value.write_to(memory),
        }
    }
}

/// Checks targets before shapes are known: element types, sizes, and that no two targets share memory.
pub(crate) fn check_targets<'t>(
    targets: impl Iterator<Item = (&'t ValueInfo, &'t OutputTarget<'t>)>,
) -> Result<()> {
    let mut spans: Vec<(&str, (usize, usize))> = Vec::new();
    for (info, target) in targets {
        let name = &info.name;
        if info.sequence {
            return Err(Error::Argument(format!(
                "output {name:?} is {info}, and only a tensor can have a buffer"
            )));
        }
        target.check_size(info)?;
        // Rust's rules for references keep slices apart.
        if let TargetBytes::Host(_) = target.bytes {
            continue;
        }
        let span = target.span();
        if let Some((other, _)) = spans.iter().find(|(_, other)| spans_overlap(span, *other)) {
            return Err(Error::Argument(format!(
                "outputs {other:?} and {name:?} share memory, so one result would overwrite the other; give each \
                 output its own memory"
            )));
        }
        spans.push((name, span));
    }
    Ok(())
}

/// Requested outputs by index, with memory for an output if the caller gives some.
pub(crate) type Targets<'a> = [(usize, Option<OutputTarget<'a>>)];

/// Returns the address ranges of the targets.
pub(crate) fn target_spans<'a>(targets: &'a Targets<'_>) -> impl Iterator<Item = (usize, usize)> + 'a {
    targets.iter().filter_map(|(_, target)| target.as_ref().map(OutputTarget::span))
}

/// Checks requested outputs before a run.
pub(crate) fn check_requested(outputs: &[ValueInfo], requested: &Targets<'_>) -> Result<()> {
    if let Some((position, _)) = requested.iter().find(|(output, _)| *output >= outputs.len()) {
        let count = outputs.len();
        return Err(Error::Argument(format!(
            "output index {position} is out of range: the model has {count} outputs"
        )));
    }
    check_targets(requested.iter().filter_map(|(output, target)| Some((&outputs[*output], target.as_ref()?))))
}

/// Checks that there is one target for each output, and that it may fit.
pub(crate) fn check_all_targets(infos: &[ValueInfo], targets: &[OutputTarget<'_>]) -> Result<()> {
    if infos.len() != targets.len() {
        return Err(Error::OutputCount {
            expected: infos.len(),
            names: infos.iter().map(|info| info.name.clone()).collect(),
            found: targets.len(),
        });
    }
    check_targets(infos.iter().zip(targets))
}

/// Writer of results to their targets. It remembers the first one that does not fit.
#[derive(Debug)]
pub(crate) struct OutputWriter<'a, 'b> {
    targets: &'a mut [OutputTarget<'b>],
    /// Index, type and shape of the first result that did not fit.
    misfit: Option<(usize, DType, Vec<usize>)>,
}

impl<'a, 'b> OutputWriter<'a, 'b> {
    pub(crate) fn new(targets: &'a mut [OutputTarget<'b>]) -> OutputWriter<'a, 'b> {
        OutputWriter { targets, misfit: None }
    }

    pub(crate) fn write(&mut self, at: usize, value: OutputView<'_>) -> std::result::Result<(), DeviceError> {
        match self.targets.get_mut(at) {
            Some(target) if target.dtype == value.dtype && target.dims == value.dims => {
                target.write(value)?;
            }
            _ if self.misfit.is_none() => self.misfit = Some((at, value.dtype, value.dims.to_vec())),
            _ => {}
        }
        Ok(())
    }

    /// Returns an error if a result did not fit.
    pub(crate) fn finish(self, infos: &[ValueInfo]) -> Result<()> {
        match self.misfit {
            None => Ok(()),
            Some((at, dtype, dims)) => self.targets[at].check(&infos[at], dtype, &dims),
        }
    }
}
