//! Destinations of the results of a step.

use ortrain_graph::{DType, Tensor, byte_length};
use ortrain_program::{Deliver, Delivered, DeviceError};

use crate::{Error, Result, ValueInfo};

/// Copies the results of a step, an evaluation or a run into tensors.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// # let (mut state, mut module, mut optimizer) = setup::training()?;
/// # let batch = setup::batch();
/// # let inputs = batch.each_ref().map(ortrain::RunInput::from);
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
pub fn collect(step: impl FnOnce(&mut Deliver<'_>) -> Result<()>) -> Result<Vec<Tensor>> {
    let mut results = Vec::new();
    step(&mut |_, dtype, dims, value| {
        results.push(value.to_tensor(dtype, dims)?);
        Ok(())
    })?;
    Ok(results)
}

/// Memory of the caller for one result of a step: element type, shape, and a buffer for the little-endian
/// elements.
///
/// ```
/// use ortrain::Destination;
///
/// let mut loss = [0.0];
/// let destination = Destination::f32(&[], &mut loss);
/// assert_eq!(destination.bytes.len(), 4);
/// ```
///
/// Two results cannot share memory, nor can a result and an input: the borrow checker rejects it.
///
/// ```compile_fail,E0499
/// # use ortrain::Destination;
/// let mut room = [0.0; 2];
/// let both = [Destination::f32(&[2], &mut room), Destination::f32(&[2], &mut room)];
/// # drop(both);
/// ```
#[derive(Debug)]
pub struct Destination<'a> {
    /// Element type of the result.
    pub dtype: DType,
    /// Shape of the result.
    pub dims: &'a [usize],
    /// Buffer for the elements, row-major.
    pub bytes: &'a mut [u8],
}

impl<'a> Destination<'a> {
    /// Wraps a buffer for a float32 result.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::RunInput::from);
    /// use ortrain::Destination;
    ///
    /// let mut loss = [0.0];
    /// module.eval_step_into(&state, &inputs, &mut [Destination::f32(&[], &mut loss)])?;
    /// assert!(loss[0] > 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    #[must_use]
    pub fn f32(dims: &'a [usize], elements: &'a mut [f32]) -> Destination<'a> {
        Destination { dtype: DType::F32, dims, bytes: bytemuck::cast_slice_mut(elements) }
    }

    /// Checks that the result has the type and shape of this destination.
    pub(crate) fn check(&self, info: &ValueInfo, dtype: DType, dims: &[usize]) -> Result<()> {
        if self.dtype == dtype && self.dims == dims {
            return Ok(());
        }
        Err(self.mismatch_error(info, format!("{dtype}{dims:?}"), Some(dims.to_vec())))
    }

    fn mismatch_error(&self, info: &ValueInfo, expected: String, dims: Option<Vec<usize>>) -> Error {
        let actual = format!("{}{:?}", self.dtype, self.dims);
        Error::Output { name: info.name.clone(), expected, found: actual, dims }
    }
}

/// Checks destinations before shapes are known: their number, element types and buffer lengths.
pub(crate) fn check_destinations(infos: &[ValueInfo], destinations: &[Destination<'_>]) -> Result<()> {
    if infos.len() != destinations.len() {
        return Err(Error::OutputCount {
            expected: infos.len(),
            names: infos.iter().map(|info| info.name.clone()).collect(),
            found: destinations.len(),
        });
    }
    for (info, destination) in infos.iter().zip(destinations) {
        if destination.dtype != info.dtype {
            return Err(destination.mismatch_error(info, info.to_string(), None));
        }
        let (name, actual_bytes) = (&info.name, destination.bytes.len());
        match byte_length(destination.dtype, destination.dims) {
            Ok(bytes) if bytes == actual_bytes => {}
            Ok(bytes) => {
                let (dtype, dims) = (destination.dtype, destination.dims);
                return Err(Error::Argument(format!(
                    "the buffer of output {name:?} is declared as {dtype}{dims:?} ({bytes} bytes), but it has \
                     {actual_bytes} bytes"
                )));
            }
            Err(error) => return Err(Error::Argument(format!("the buffer of output {name:?}: {error}"))),
        }
    }
    Ok(())
}

/// Writer of results to their destinations. It remembers the first one that does not fit.
#[derive(Debug)]
pub(crate) struct OutputWriter<'a, 'b> {
    destinations: &'a mut [Destination<'b>],
    /// Index, type and shape of the first result that did not fit.
    misfit: Option<(usize, DType, Vec<usize>)>,
}

impl<'a, 'b> OutputWriter<'a, 'b> {
    pub(crate) fn new(destinations: &'a mut [Destination<'b>]) -> OutputWriter<'a, 'b> {
        OutputWriter { destinations, misfit: None }
    }

    pub(crate) fn write(
        &mut self,
        at: usize,
        dtype: DType,
        dims: &[usize],
        value: Delivered<'_>,
    ) -> std::result::Result<(), DeviceError> {
        match self.destinations.get_mut(at) {
            Some(destination) if destination.dtype == dtype && destination.dims == dims => {
                value.copy_to(destination.bytes)?;
            }
            _ if self.misfit.is_none() => self.misfit = Some((at, dtype, dims.to_vec())),
            _ => {}
        }
        Ok(())
    }

    /// Returns an error if a result did not fit.
    pub(crate) fn finish(self, infos: &[ValueInfo]) -> Result<()> {
        match self.misfit {
            None => Ok(()),
            Some((at, dtype, dims)) => self.destinations[at].check(&infos[at], dtype, &dims),
        }
    }
}
