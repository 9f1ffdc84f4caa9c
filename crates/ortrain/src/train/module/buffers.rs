//! Buffers of all parameters or gradients, and their norms.

use std::sync::Arc;

use ortrain_graph::{DType, Tensor};
use ortrain_program::Memory;

use super::Module;
use crate::state::layout::Entry;
use crate::{CheckpointState, Error, Result};

/// The norms of a parameter and of its gradient: see [`Module::norms`].
///
/// ```
/// let norms = ortrain::Norms { name: "fc2.bias".into(), parameter: 2.0, gradient: 0.01 };
/// println!("{}: a step of rate 0.1 changes it by {:.1e}", norms.name, 0.1 * norms.gradient / norms.parameter);
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Norms {
    /// Name of the parameter.
    pub name: String,
    /// L2 norm of the parameter.
    pub parameter: f64,
    /// L2 norm of its accumulated gradient.
    pub gradient: f64,
}

/// Computes the L2 norm of a parameter, or of its gradient, in a plane.
pub(super) fn norm(entry: &Entry, plane: &Memory) -> Result<f64> {
    /// Chunk size in bytes; a multiple of every element size.
    const CHUNK_BYTES: usize = 1 << 16;
    let bytes = entry.elements() * entry.dtype.size();
    let mut part = [0; CHUNK_BYTES];
    let mut sum = 0.0;
    for at in (0..bytes).step_by(CHUNK_BYTES) {
        let part = &mut part[..CHUNK_BYTES.min(bytes - at)];
        plane.read(entry.offset + at, part)?;
        sum += match entry.dtype {
            DType::F32 => sum_of_squares(part, |bits: [u8; 4]| f64::from(f32::from_le_bytes(bits))),
            DType::F64 => sum_of_squares(part, f64::from_le_bytes),
            dtype => {
                let elements = Tensor::new(dtype, vec![part.len() / dtype.size()], part.to_vec().into());
                elements.iter().flat_map(Tensor::to_f64).map(|element| element.powi(2)).sum::<f64>()
            }
        };
    }
    Ok(sum.sqrt())
}

/// Sums the squares of numbers in sixteen accumulators, since a single accumulator would be bound by latency.
pub(super) fn sum_of_squares<const SIZE: usize>(bytes: &[u8], to_f64: impl Fn([u8; SIZE]) -> f64) -> f64 {
    let mut sums = [0.0; 16];
    let add = |sum: &mut f64, bits: [u8; SIZE]| {
        let value = to_f64(bits);
        *sum += value * value;
    };
    let (rows, rest) = bytes.as_chunks::<SIZE>().0.as_chunks::<16>();
    for row in rows {
        sums.iter_mut().zip(row).for_each(|(sum, &bits)| add(sum, bits));
    }
    sums.iter_mut().zip(rest).for_each(|(sum, &bits)| add(sum, bits));
    sums.iter().sum()
}

pub(super) fn check_packable(entry: &Entry) -> Result<()> {
    if entry.dtype == DType::F32 {
        return Ok(());
    }
    Err(Error::Argument(format!(
        "parameter {:?} is {}, but a packed buffer holds float32 only; read the parameter itself",
        entry.name, entry.dtype
    )))
}

impl Module {
    /// Returns the parameters of the training model, in the order of its inputs.
    pub(super) fn packed_entries<'a>(
        &'a self,
        state: &'a CheckpointState,
        trainable_only: bool,
    ) -> impl Iterator<Item = &'a Entry> {
        let entries = self.parameters.iter().filter_map(|name| state.entry(name));
        entries.filter(move |entry| entry.requires_grad || !trainable_only)
    }

    /// Returns the number of elements of all parameters of the training model, or of the trained ones.
    #[must_use]
    pub fn parameters_size(&self, state: &CheckpointState, trainable_only: bool) -> usize {
        self.packed_entries(state, trainable_only).map(Entry::elements).sum()
    }

    /// Concatenates the parameters, in the order of the training model's inputs.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// let buffer = module.copy_parameters_to_buffer(&state, true)?;
    /// assert_eq!(buffer.len(), 970);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If a parameter is not float32, or the state is nominal.
    pub fn copy_parameters_to_buffer(
        &self,
        state: &CheckpointState,
        trainable_only: bool,
    ) -> Result<Vec<f32>> {
        self.check_state(state)?;
        self.pack(state, trainable_only, |entry| state.memory_of(entry))
    }

    /// Replaces the parameters by a buffer of [`Module::copy_parameters_to_buffer`]. A buffer of all
    /// parameters also gives a nominal state its values.
    ///
    /// A round of federated averaging on the server:
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// let clients = [vec![1.0_f32; 970], vec![3.0; 970]];
    /// let mean: Vec<f32> = clients[0].iter().zip(&clients[1]).map(|(a, b)| (a + b) / 2.0).collect();
    /// module.copy_buffer_to_parameters(&mut state, &mean, true)?;
    /// assert_eq!(state.parameter("fc2.bias")?.to_tensor()?.to_vec::<f32>(), [2.0; 10]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the buffer has another length or a parameter is not float32. If the state is nominal, and the
    /// buffer has trained parameters only, or the model does not have all parameters.
    pub fn copy_buffer_to_parameters(
        &self,
        state: &mut CheckpointState,
        buffer: &[f32],
        trainable_only: bool,
    ) -> Result<()> {
        self.check_layout(state)?;
        if trainable_only {
            state.require_values()?;
        }
        self.check_buffer(state, trainable_only, buffer)?;
        if state.is_nominal() {
            if let Some(entry) = state.entries().iter().find(|entry| !self.parameters.contains(&entry.name)) {
                return Err(Error::State(format!(
                    "the state stays nominal: the training model has no parameter {:?}, so the buffer has no value \
                     for it",
                    entry.name
                )));
            }
            state.mark_full()?;
        }
        self.unpack(state, trainable_only, buffer, |entry| state.memory_of(entry))?;
        if !trainable_only {
            state.bump_generation();
        }
        state.initialize_slots()
    }

    /// Copies the accumulated gradients into one buffer, in the order and with the length of
    /// [`Module::copy_parameters_to_buffer`] for the trained parameters.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// module.train_step(&mut state, &inputs, &mut |_, _| Ok(()))?;
    /// let gradients = module.copy_gradients_to_buffer(&state)?;
    /// let norm = gradients.iter().map(|element| element * element).sum::<f32>().sqrt();
    /// assert!(norm > 0.0);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If a parameter is not float32, or the state is nominal.
    pub fn copy_gradients_to_buffer(&self, state: &CheckpointState) -> Result<Vec<f32>> {
        self.check_state(state)?;
        self.pack(state, true, |entry| &self.gradients[entry.plane])
    }

    /// Replaces the accumulated gradients by a buffer of [`Module::copy_gradients_to_buffer`], or by a mean
    /// of several. A pending [`Module::lazy_reset_grad`] remains pending.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// # module.train_step(&mut state, &inputs, &mut |_, _| Ok(()))?;
    /// let mut gradients = module.copy_gradients_to_buffer(&state)?;
    /// gradients.iter_mut().for_each(|element| *element = element.clamp(-0.01, 0.01));
    /// module.copy_buffer_to_gradients(&state, &gradients)?;
    /// optimizer.step(&mut state, &module)?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the buffer has another length, a parameter is not float32, or the state is nominal.
    pub fn copy_buffer_to_gradients(&mut self, state: &CheckpointState, buffer: &[f32]) -> Result<()> {
        self.check_state(state)?;
        self.check_buffer(state, true, buffer)?;
        self.unpack(state, true, buffer, |entry| &self.gradients[entry.plane])?;
        Ok(())
    }

    /// Returns the L2 norms of each trained parameter and of its accumulated gradient, in name order. Sums
    /// are `f64`.
    ///
    /// A layer with zero gradients is dead; a layer with gradients that are large relative to its parameters
    /// explodes.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let (mut state, mut module, mut optimizer) = setup::training()?;
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// module.train_step(&mut state, &inputs, &mut |_, _| Ok(()))?;
    /// for norms in module.norms(&state)? {
    ///     assert!(norms.gradient > 0.0, "{} learns nothing", norms.name);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the state is nominal or belongs to another module.
    pub fn norms(&self, state: &CheckpointState) -> Result<Vec<Norms>> {
        self.check_state(state)?;
        let trained = state.entries().iter().filter(|entry| entry.requires_grad);
        let norms = trained.map(|entry| {
            Ok(Norms {
                name: entry.name.to_string(),
                parameter: norm(entry, state.memory_of(entry))?,
                gradient: norm(entry, &self.gradients[entry.plane])?,
            })
        });
        norms.collect()
    }

    /// Returns the L2 norm of all gradients together.
    pub(crate) fn gradient_norm(&self, state: &CheckpointState) -> Result<f64> {
        let trained = state.entries().iter().filter(|entry| entry.requires_grad);
        let squares = trained.map(|entry| Ok(norm(entry, &self.gradients[entry.plane])?.powi(2)));
        Ok(squares.sum::<Result<f64>>()?.sqrt())
    }

    /// Concatenates the values of the parameters in `memory`.
    pub(super) fn pack<'a>(
        &'a self,
        state: &'a CheckpointState,
        trainable_only: bool,
        memory: impl Fn(&'a Entry) -> &'a Arc<Memory>,
    ) -> Result<Vec<f32>> {
        let mut buffer = vec![0.0_f32; self.parameters_size(state, trainable_only)];
        let mut rest = buffer.as_mut_slice();
        for entry in self.packed_entries(state, trainable_only) {
            check_packable(entry)?;
            let (part, after) = rest.split_at_mut(entry.elements());
            memory(entry).read(entry.offset, bytemuck::cast_slice_mut(part))?;
            rest = after;
        }
        Ok(buffer)
    }

    /// Checks that a buffer has the length of a result of [`Module::pack`].
    pub(super) fn check_buffer(
        &self,
        state: &CheckpointState,
        trainable_only: bool,
        buffer: &[f32],
    ) -> Result<()> {
        let expected = self.parameters_size(state, trainable_only);
        if buffer.len() != expected {
            return Err(Error::BufferLength { expected, found: buffer.len() });
        }
        self.packed_entries(state, trainable_only).try_for_each(check_packable)
    }

    /// Writes a checked buffer to the parameters in `memory`.
    pub(super) fn unpack<'a>(
        &'a self,
        state: &'a CheckpointState,
        trainable_only: bool,
        mut buffer: &[f32],
        memory: impl Fn(&'a Entry) -> &'a Arc<Memory>,
    ) -> Result<()> {
        for entry in self.packed_entries(state, trainable_only) {
            let (part, after) = buffer.split_at(entry.elements());
            memory(entry).write(entry.offset, bytemuck::cast_slice(part))?;
            buffer = after;
        }
        Ok(())
    }
}
