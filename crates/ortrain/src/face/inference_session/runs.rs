//! Runs of a session.

use std::ops::Range;
use std::time::Instant;

use ortrain_graph::Tensor;
use ortrain_program::{
    GradientMode, InputBytes, InputView, Memory, OutputSink, OutputView, RunError, Scalars, SlotId,
};
use smallvec::SmallVec;

use super::{
    InferenceSession, OrderedInputs, Origin, Prepared, PreparedKey, Sequences, check_inputs, tensor_ranges,
    variant_of,
};
use crate::exec::caller_memory::copy_tensor;
use crate::exec::outputs::{OutputWriter, Targets, check_all_targets, check_requested};
use crate::exec::over_limit;
use crate::exec::value::Value;
use crate::{Error, OutputTarget, Result, collect};

impl InferenceSession {
    /// Computes the outputs, and passes them to `deliver` in the order of [`InferenceSession::outputs`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// # use ortrain::{InferenceSession, SessionOptions};
    /// let mut session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// let mut logits = vec![0; 2 * 10 * 4];
    /// session.run(&inputs[..1], &mut |_, value| value.copy_to(&mut logits))?;
    /// assert!(logits.iter().any(|byte| *byte != 0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the inputs do not fit, the run fails, or the model has sequence inputs or outputs: use
    /// [`InferenceSession::run_values`] for sequences.
    pub fn run(&mut self, inputs: &[InputView<'_>], deliver: &mut OutputSink<'_>) -> Result<()> {
        self.check_tensors_only("run supports only tensors; call run_values for sequences")?;
        self.base.signature.check(inputs)?;
        let at = self.prepared_index(&PreparedKey::default())?;
        self.execute(at, inputs, &[], deliver)
    }

    /// Computes the outputs and writes them to memory of the caller, in the order of
    /// [`InferenceSession::outputs`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::InputView::from);
    /// use ortrain::{InferenceSession, OutputTarget, SessionOptions};
    ///
    /// let mut session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// let mut logits = [0.0; 20];
    /// session.run_into(&inputs[..1], &mut [OutputTarget::f32(&[2, 10], &mut logits)])?;
    /// assert!(logits.iter().any(|&logit| logit != 0.0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`InferenceSession::run`]; also if number, types or shapes of `outputs` do not match the results.
    /// Then nothing has been written.
    pub fn run_into(&mut self, inputs: &[InputView<'_>], outputs: &mut [OutputTarget<'_>]) -> Result<()> {
        self.check_tensors_only("run_into supports only tensors; call run_values for sequences")?;
        self.base.signature.check(inputs)?;
        check_all_targets(&self.outputs, outputs)?;
        let at = self.prepared_index(&PreparedKey::default())?;
        let known = self.known_output_shapes(at, inputs)?;
        for (info, (output, known)) in self.outputs.iter().zip(outputs.iter().zip(&known)) {
            if let Some(dims) = known {
                output.check(info, info.dtype, dims)?;
            }
        }
        if known.iter().all(Option::is_some) {
            let mut fill = OutputWriter::new(outputs);
            self.execute(at, inputs, &[], &mut |k, value| fill.write(k, value))?;
            return fill.finish(&self.outputs);
        }
        // Data-dependent shapes are known after the run.
        let results = collect(|deliver| self.execute(at, inputs, &[], deliver))?;
        for (info, (output, result)) in self.outputs.iter().zip(outputs.iter().zip(&results)) {
            output.check(info, result.dtype(), result.dims())?;
        }
        for (output, result) in outputs.iter_mut().zip(&results) {
            output.write(OutputView::from(result))?;
        }
        Ok(())
    }

    pub(super) fn check_tensors_only(&self, help: &str) -> Result<()> {
        match self.base.inputs.iter().chain(&self.outputs).find(|info| info.sequence) {
            Some(info) => Err(Error::Argument(format!("{:?} is {info}; {help}", info.name))),
            None => Ok(()),
        }
    }

    /// Computes all outputs, or only the outputs at the positions `only`, in this order.
    ///
    /// With `only`, values that these outputs do not need are not computed. Inputs are in the order of
    /// [`InferenceSession::inputs`] and remain unchanged, even if the model updates sequences in place.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::{InferenceSession, ModelSource, SessionOptions, Tensor, Value};
    ///
    /// let model = setup::artifacts()?.optimizer_model.expect("it was asked for");
    /// let mut session = InferenceSession::new(ModelSource::from_proto(&model)?, SessionOptions::default())?;
    /// let sequence = |value| Value::Sequence(vec![Tensor::f32(&[2], &[value; 2])]);
    /// let (rate, step) = (Tensor::f32(&[1], &[0.1]), Tensor::i64(&[1], &[1]));
    /// let inputs = [rate.into(), step.into(), sequence(1.0), sequence(0.5), sequence(0.0), sequence(0.0)];
    /// let updated = session.run_values(&inputs, Some(&[0]))?;
    /// assert_eq!(updated.len(), 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the inputs do not fit, a position has no output, or the run fails.
    pub fn run_values(&mut self, inputs: &[Value], only: Option<&[usize]>) -> Result<Vec<Value>> {
        if inputs.len() != self.base.inputs.len() {
            return Err(Error::InputCount {
                expected: self.base.inputs.len(),
                names: self.base.inputs.iter().map(|info| info.name.clone()).collect(),
                found: inputs.len(),
            });
        }
        let values = inputs.iter().map(InputView::from).collect();
        let all_outputs: Vec<usize> = (0..self.outputs.len()).collect();
        let mut requested: Vec<(usize, Option<OutputTarget<'_>>)> =
            only.unwrap_or(&all_outputs).iter().map(|&output| (output, None)).collect();
        let ordered = OrderedInputs { overridden: Vec::new(), values };
        let results = self.run_ordered(ordered, &mut requested, only.is_some(), None)?;
        Ok(results.into_iter().flatten().collect())
    }

    /// Computes outputs from inputs by name. Values in memory of the caller are read and written in place
    /// where possible.
    ///
    /// Besides inputs, `inputs` may name [`InferenceSession::overridable_initializers`], to override them for
    /// this run. `outputs` are indices among [`InferenceSession::outputs`], with memory for an output if the caller
    /// gives some. With `restricted`, only these outputs are computed; otherwise every output is computed.
    ///
    /// Returns a value for each of `outputs`, or `None` if it was written into memory. An output may
    /// overwrite the memory of an input.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use std::sync::Arc;
    ///
    /// use ortrain::{DType, InferenceSession, InputView, Memory, OutputTarget, SessionOptions};
    ///
    /// let mut session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// let (x, logits) = (Arc::new(Memory::new(2 * 64 * 4)), Arc::new(Memory::new(2 * 10 * 4)));
    /// x.write(0, &1_f32.to_le_bytes())?;
    /// let input = InputView::in_memory(DType::F32, &[2, 64], &x);
    /// let target = OutputTarget::in_memory(DType::F32, &[2, 10], &logits);
    /// session.run_bound(&[("x", input)], &mut [(0, Some(target))], true)?;
    /// assert!(!logits.is_zero()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If a name is unknown, missing or occurs twice; a value does not fit; memory is too small, read-only,
    /// or shared by two outputs; or the run fails. Then nothing has been written.
    pub fn run_bound(
        &mut self,
        inputs: &[(&str, InputView<'_>)],
        outputs: &mut Targets<'_>,
        restricted: bool,
    ) -> Result<Vec<Option<Value>>> {
        let ordered = self.order_inputs(inputs)?;
        self.run_ordered(ordered, outputs, restricted, None)
    }

    /// Runs like [`InferenceSession::run_bound`], but passes tensors to `deliver` like
    /// [`InferenceSession::run`].
    ///
    /// Tensors are delivered with their index in `outputs`, on the device of the session. Tensors that are
    /// written into memory are not delivered; sequences are returned.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::{InferenceSession, InputView, SessionOptions, Tensor};
    ///
    /// let mut session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// let x = Tensor::f32(&[2, 64], &[0.5; 128]);
    /// let mut logits = None;
    /// session.run_delivered(&[("x", InputView::from(&x))], &mut [(0, None)], true, &mut |_, value| {
    ///     logits = Some(value.to_tensor()?);
    ///     Ok(())
    /// })?;
    /// assert_eq!(logits.expect("it was delivered").dims(), [2, 10]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`InferenceSession::run_bound`], and the errors of `deliver`.
    pub fn run_delivered(
        &mut self,
        inputs: &[(&str, InputView<'_>)],
        outputs: &mut Targets<'_>,
        restricted: bool,
        deliver: &mut OutputSink<'_>,
    ) -> Result<Vec<Option<Value>>> {
        let ordered = self.order_inputs(inputs)?;
        self.run_ordered(ordered, outputs, restricted, Some(deliver))
    }

    /// Sorts the values of a run into the order of the inputs.
    pub(super) fn order_inputs<'v>(&self, named: &[(&str, InputView<'v>)]) -> Result<OrderedInputs<'v>> {
        let find = |name: &str| named.iter().find(|(known, _)| *known == name).map(|(_, input)| *input);
        let mut ordered = OrderedInputs { overridden: Vec::new(), values: Vec::with_capacity(named.len()) };
        for info in &self.base.inputs {
            let missing = || Error::Argument(format!("no value was given for input {:?}", info.name));
            ordered.values.push(find(&info.name).ok_or_else(missing)?);
        }
        for (at, info) in self.overridable.iter().enumerate() {
            if let Some(input) = find(&info.name) {
                ordered.overridden.push(at);
                ordered.values.push(input);
            }
        }
        if ordered.values.len() != named.len() {
            return Err(self.name_error(named));
        }
        Ok(ordered)
    }

    /// Returns the error for an unknown or duplicate name.
    pub(super) fn name_error(&self, named: &[(&str, InputView<'_>)]) -> Error {
        let known: Vec<&str> =
            self.base.inputs.iter().chain(&self.overridable).map(|info| info.name.as_str()).collect();
        let mut names: Vec<&str> = named.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        match names.iter().find(|name| !known.contains(name)) {
            Some(name) => {
                Error::Argument(format!("the model has no input {name:?}; it has {}", known.join(", ")))
            }
            None => {
                let twice = names.windows(2).find(|pair| pair[0] == pair[1]).map_or("", |pair| pair[0]);
                Error::Argument(format!("input {twice:?} is given twice"))
            }
        }
    }

    pub(super) fn run_ordered(
        &mut self,
        ordered: OrderedInputs<'_>,
        requested: &mut Targets<'_>,
        restricted: bool,
        deliver: Option<&mut OutputSink<'_>>,
    ) -> Result<Vec<Option<Value>>> {
        check_requested(&self.outputs, requested)?;
        let OrderedInputs { overridden, values } = ordered;
        self.make_variant(&overridden)?;
        let variant = variant_of(&mut self.base, &mut self.variants, &overridden);
        check_inputs(variant, &values)?;

        // Split into values to read in place, values to copy first, and sequences.
        let device = self.backend.device();
        let copy = |(k, input): (usize, &InputView<'_>)| match input.memory() {
            Some(memory) if memory.device() != device || variant.needs_copy(k, input, requested) => {
                copy_tensor(input)
            }
            _ => Ok(None),
        };
        let copies: Vec<Option<Tensor>> = values.iter().enumerate().map(copy).collect::<Result<_>>()?;
        let (mut tensors, mut sequences, mut in_place) = (Vec::new(), Sequences::new(), Vec::new());
        let mut key = PreparedKey {
            selected_outputs: restricted.then(|| requested.iter().map(|(output, _)| *output).collect()),
            ..PreparedKey::default()
        };
        for (k, (input, copy)) in values.iter().zip(&copies).enumerate() {
            match (input.bytes, copy) {
                (_, Some(tensor)) => tensors.push(InputView::from(tensor)),
                (InputBytes::Host(_), None) => tensors.push(*input),
                (InputBytes::Memory(memory), None) => {
                    key.in_place.push((k, input.dims.to_vec()));
                    in_place.push(&**memory);
                }
                (InputBytes::Sequence(several), None) => {
                    key.shapes.push(several.iter().map(|tensor| tensor.dims().to_vec()).collect());
                    sequences.push((variant.inputs[k].dtype, several));
                }
            }
        }
        key.overridden = overridden;
        let at = self.prepared_index(&key)?;
        // Preparation found that nodes update some of these values in place: such values are copied after
        // all.
        if self.prepared[at].key != key {
            let PreparedKey { overridden, .. } = key;
            return self.run_ordered(OrderedInputs { overridden, values }, requested, restricted, deliver);
        }
        let split = (&tensors[..], &sequences, &in_place[..]);
        self.run_prepared(at, split, requested, deliver).map_err(|error| match in_place.is_empty() {
            true => error,
            false => self.explain_with_copies(error, &values, &key),
        })
    }

    pub(super) fn run_prepared(
        &mut self,
        at: usize,
        (tensors, sequences, in_place): (&[InputView<'_>], &Sequences<'_>, &[&Memory]),
        requested: &mut Targets<'_>,
        mut deliver: Option<&mut OutputSink<'_>>,
    ) -> Result<Vec<Option<Value>>> {
        let Prepared { key, planes, origins, .. } = &self.prepared[at];
        let restricted = key.selected_outputs.is_some();
        let sequence_ranges: Vec<Vec<Range<usize>>> = sequences
            .iter()
            .zip(&key.shapes)
            .map(|((dtype, _), shapes)| tensor_ranges(*dtype, shapes))
            .collect();
        for ((plane, (_, several)), ranges) in planes.iter().zip(sequences).zip(&sequence_ranges) {
            for (tensor, tensor_range) in several.iter().zip(ranges) {
                plane.write(tensor_range.start, tensor.data())?;
            }
        }
        let origin = |(k, (output, _)): (usize, &(usize, _))| origins[if restricted { k } else { *output }];
        let sources: Vec<Origin> = requested.iter().enumerate().map(origin).collect();
        let mut sure = true;
        if requested.iter().any(|(_, target)| target.is_some()) {
            let known = self.known_output_shapes(at, tensors)?;
            for ((output, target), source) in requested.iter().zip(&sources) {
                let (Some(target), &Origin::Delivered(position)) = (target, source) else { continue };
                let info = &self.outputs[*output];
                match &known[position] {
                    Some(dims) => target.check(info, info.dtype, dims)?,
                    None => sure = false,
                }
            }
        }
        let mut delivered: Vec<Option<Tensor>> = vec![None; requested.len()];
        self.execute(at, tensors, in_place, &mut |result_index, value| {
            for (k, (_, target)) in requested.iter_mut().enumerate() {
                if !matches!(sources[k], Origin::Delivered(of) if of == result_index) {
                    continue;
                }
                match (target, &mut deliver) {
                    (Some(target), _) if sure => target.write(value)?,
                    (None, Some(deliver)) => deliver(k, value)?,
                    _ => delivered[k] = Some(value.to_tensor()?),
                }
            }
            Ok(())
        })?;
        if !sure {
            for ((output, target), result) in requested.iter().zip(&delivered) {
                if let (Some(target), Some(result)) = (target, result) {
                    target.check(&self.outputs[*output], result.dtype(), result.dims())?;
                }
            }
            for ((_, target), result) in requested.iter_mut().zip(&mut delivered) {
                if let Some(target) = target
                    && let Some(result) = result.take()
                {
                    target.write(OutputView::from(&result))?;
                }
            }
        }
        let planes = &self.prepared[at].planes;
        let value = |(k, source): (usize, &Origin)| match *source {
            Origin::Delivered(_) => Ok(delivered[k].take().map(Value::Tensor)),
            Origin::Sequence(at) => {
                let (dtype, several) = sequences[at];
                let read = |(tensor, source_range): (&Tensor, &Range<usize>)| {
                    let bytes = planes[at].to_vec(source_range.start, source_range.len())?;
                    let read = Tensor::new(dtype, tensor.dims().to_vec(), bytes.into());
                    Ok(read.expect("the size is unchanged"))
                };
                let read = several.iter().zip(&sequence_ranges[at]).map(read).collect::<Result<_>>()?;
                Ok(Some(Value::Sequence(read)))
            }
        };
        sources.iter().enumerate().map(value).collect()
    }

    /// Runs a prepared executable on checked values.
    pub(super) fn execute(
        &mut self,
        at: usize,
        tensors: &[InputView<'_>],
        in_place: &[&Memory],
        deliver: &mut OutputSink<'_>,
    ) -> Result<()> {
        let Prepared { key, runners, planes, .. } = &mut self.prepared[at];
        let bound: SmallVec<[&Memory; 32]> = planes.iter().chain(in_place.iter().copied()).collect();
        let how = (GradientMode::Accumulate, Scalars::default());
        let start = Instant::now();
        let run = runners.run_traced(&mut self.work, &bound, how, self.trace.as_mut(), tensors, deliver);
        if let (Some(trace), Ok(())) = (&mut self.trace, &run) {
            trace.record_run(start, Instant::now());
        }
        run.map_err(|error| match key.in_place.is_empty() {
            true => {
                let variant = variant_of(&mut self.base, &mut self.variants, &key.overridden);
                over_limit::explain(error, runners, &variant.signature, &self.work, tensors)
            }
            false => error,
        })
    }

    /// Explains an error of a run on values in the caller's memory. The advice for a memory-limit error
    /// assumes a run on copies.
    pub(super) fn explain_with_copies(
        &mut self,
        error: Error,
        inputs: &[InputView<'_>],
        key: &PreparedKey,
    ) -> Error {
        let Error::Run(RunError::OverLimit(_)) = &error else { return error };
        let copies: Vec<Tensor> = inputs.iter().filter_map(|input| copy_tensor(input).ok()?).collect();
        let tensors: Vec<InputView<'_>> = copies.iter().map(InputView::from).collect();
        let (only, shapes, overridden) =
            (key.selected_outputs.clone(), key.shapes.clone(), key.overridden.clone());
        let Ok(at) = self.prepared_index(&PreparedKey {
            selected_outputs: only,
            shapes,
            overridden,
            in_place: Vec::new(),
        }) else {
            return error;
        };
        let variant = variant_of(&mut self.base, &mut self.variants, &key.overridden);
        over_limit::explain(error, &self.prepared[at].runners, &variant.signature, &self.work, &tensors)
    }

    /// Returns the shapes of the delivered results; `None` for shapes that are unknown before a run.
    pub(super) fn known_output_shapes(
        &mut self,
        at: usize,
        tensors: &[InputView<'_>],
    ) -> Result<Vec<Option<Vec<usize>>>> {
        let Prepared { key, runners, .. } = &mut self.prepared[at];
        let shapes = runners.executor(&self.work, tensors).map(|runner| {
            let schedule = runner.schedule();
            let dims =
                |slot: &SlotId| schedule.slots[slot.0 as usize].ty.as_ref().map(|(_, dims)| dims.clone());
            schedule.outputs.iter().map(dims).collect()
        });
        shapes.map_err(|error| match key.in_place.is_empty() {
            true => {
                let variant = variant_of(&mut self.base, &mut self.variants, &key.overridden);
                over_limit::explain(error, runners, &variant.signature, &self.work, tensors)
            }
            false => error,
        })
    }
}
