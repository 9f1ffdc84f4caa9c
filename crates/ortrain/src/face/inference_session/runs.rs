//! Runs of a session.

use std::ops::Range;
use std::time::Instant;

use ortrain_graph::Tensor;
use ortrain_program::{Deliver, GradientMode, Memory, RunError, RunInput, Scalars, SlotId};
use smallvec::SmallVec;

use super::{
    InferenceSession, OrderedFeeds, Origin, Prepared, PreparedKey, Sequences, check_feeds,
    check_output_buffer, check_output_buffers, tensor_ranges, variant_of,
};
use crate::exec::io_binding::copy_tensor;
use crate::exec::outputs::{OutputWriter, check_destinations};
use crate::exec::over_limit;
use crate::exec::value::Value;
use crate::{Destination, Error, Feed, Fetch, Lent, Result, collect};

impl InferenceSession {
    /// Computes the outputs, and passes them to `deliver` in the order of [`InferenceSession::outputs`].
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// # let batch = setup::batch();
    /// # let inputs = batch.each_ref().map(ortrain::RunInput::from);
    /// # use ortrain::{InferenceSession, SessionOptions};
    /// let mut session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// let mut logits = vec![0; 2 * 10 * 4];
    /// session.run(&inputs[..1], &mut |_, _, _, value| value.copy_to(&mut logits))?;
    /// assert!(logits.iter().any(|byte| *byte != 0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If the inputs do not fit, the run fails, or the model has sequence inputs or outputs: use
    /// [`InferenceSession::run_values`] for sequences.
    pub fn run(&mut self, inputs: &[RunInput<'_>], deliver: &mut Deliver<'_>) -> Result<()> {
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
    /// # let inputs = batch.each_ref().map(ortrain::RunInput::from);
    /// use ortrain::{Destination, InferenceSession, SessionOptions};
    ///
    /// let mut session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// let mut logits = [0.0; 20];
    /// session.run_into(&inputs[..1], &mut [Destination::f32(&[2, 10], &mut logits)])?;
    /// assert!(logits.iter().any(|&logit| logit != 0.0));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`InferenceSession::run`]; also if number, types or shapes of `outputs` do not match the results.
    /// Then nothing has been written.
    pub fn run_into(&mut self, inputs: &[RunInput<'_>], outputs: &mut [Destination<'_>]) -> Result<()> {
        self.check_tensors_only("run_into supports only tensors; call run_values for sequences")?;
        self.base.signature.check(inputs)?;
        check_destinations(&self.outputs, outputs)?;
        let at = self.prepared_index(&PreparedKey::default())?;
        let known = self.known_output_shapes(at, inputs)?;
        for (info, (output, known)) in self.outputs.iter().zip(outputs.iter().zip(&known)) {
            if let Some(dims) = known {
                output.check(info, info.dtype, dims)?;
            }
        }
        if known.iter().all(Option::is_some) {
            let mut fill = OutputWriter::new(outputs);
            self.execute(at, inputs, &[], &mut |k, dtype, dims, value| fill.write(k, dtype, dims, value))?;
            return fill.finish(&self.outputs);
        }
        // Data-dependent shapes are known after the run.
        let results = collect(|deliver| self.execute(at, inputs, &[], deliver))?;
        for (info, (output, result)) in self.outputs.iter().zip(outputs.iter().zip(&results)) {
            output.check(info, result.dtype(), result.dims())?;
        }
        outputs
            .iter_mut()
            .zip(&results)
            .for_each(|(output, result)| output.bytes.copy_from_slice(result.data()));
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
        let feeds = inputs.iter().map(Feed::from).collect();
        let all_outputs: Vec<usize> = (0..self.outputs.len()).collect();
        let fetch = |&output: &usize| Fetch { output, into: None };
        let fetches: Vec<Fetch<'_>> = only.unwrap_or(&all_outputs).iter().map(fetch).collect();
        let results =
            self.run_ordered(OrderedFeeds { overridden: Vec::new(), feeds }, &fetches, only.is_some(), None)?;
        Ok(results.into_iter().flatten().collect())
    }

    /// Computes outputs from inputs by name. Values in memory of the caller are read and written in place
    /// where possible.
    ///
    /// Besides inputs, `feeds` may name [`InferenceSession::overridable_initializers`], to override them for
    /// this run. With `restricted`, only the values for `fetches` are computed; otherwise every output is
    /// computed.
    ///
    /// Returns a value for each of `fetches`, or `None` if it was written into memory. An output may
    /// overwrite the memory of an input.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use std::sync::Arc;
    ///
    /// use ortrain::{DType, Feed, Fetch, InferenceSession, Lent, Memory, SessionOptions};
    ///
    /// let mut session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// let (x, logits) = (Arc::new(Memory::new(2 * 64 * 4)), Arc::new(Memory::new(2 * 10 * 4)));
    /// x.write(0, &1_f32.to_le_bytes())?;
    /// let feed = Feed::from(Lent { dtype: DType::F32, dims: &[2, 64], memory: &x });
    /// let into = Some(Lent { dtype: DType::F32, dims: &[2, 10], memory: &logits });
    /// session.run_bound(&[("x", feed)], &[Fetch { output: 0, into }], true)?;
    /// assert!(!logits.is_zero()?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// If a name is unknown, missing or occurs twice; a value does not fit; memory is too small, read-only,
    /// or shared by two outputs; or the run fails. Then nothing has been written.
    pub fn run_bound(
        &mut self,
        feeds: &[(&str, Feed<'_>)],
        fetches: &[Fetch<'_>],
        restricted: bool,
    ) -> Result<Vec<Option<Value>>> {
        let ordered = self.order_feeds(feeds)?;
        self.run_ordered(ordered, fetches, restricted, None)
    }

    /// Runs like [`InferenceSession::run_bound`], but passes tensors to `deliver` like
    /// [`InferenceSession::run`].
    ///
    /// Tensors are delivered with their index in `fetches`, on the device of the session. Tensors that are
    /// written into memory are not delivered; sequences are returned.
    ///
    /// ```
    /// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
    /// use ortrain::{Feed, Fetch, InferenceSession, SessionOptions, Tensor};
    ///
    /// let mut session = InferenceSession::new(setup::MODEL.into(), SessionOptions::default())?;
    /// let x = Tensor::f32(&[2, 64], &[0.5; 128]);
    /// let (feeds, fetches) = ([("x", Feed::from(ortrain::RunInput::from(&x)))], [Fetch { output: 0, into: None }]);
    /// let mut logits = None;
    /// session.run_delivered(&feeds, &fetches, true, &mut |_, dtype, dims, value| {
    ///     logits = Some(value.to_tensor(dtype, dims)?);
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
        feeds: &[(&str, Feed<'_>)],
        fetches: &[Fetch<'_>],
        restricted: bool,
        deliver: &mut Deliver<'_>,
    ) -> Result<Vec<Option<Value>>> {
        let ordered = self.order_feeds(feeds)?;
        self.run_ordered(ordered, fetches, restricted, Some(deliver))
    }

    /// Sorts the values of a run into the order of the inputs.
    pub(super) fn order_feeds<'v>(&self, feeds: &[(&str, Feed<'v>)]) -> Result<OrderedFeeds<'v>> {
        let find_feed = |name: &str| feeds.iter().find(|(known, _)| *known == name).map(|(_, feed)| *feed);
        let mut ordered = OrderedFeeds { overridden: Vec::new(), feeds: Vec::with_capacity(feeds.len()) };
        for info in &self.base.inputs {
            let missing = || Error::Argument(format!("no value was given for input {:?}", info.name));
            ordered.feeds.push(find_feed(&info.name).ok_or_else(missing)?);
        }
        for (at, info) in self.overridable.iter().enumerate() {
            if let Some(feed) = find_feed(&info.name) {
                ordered.overridden.push(at);
                ordered.feeds.push(feed);
            }
        }
        if ordered.feeds.len() != feeds.len() {
            return Err(self.name_error(feeds));
        }
        Ok(ordered)
    }

    /// Returns the error for an unknown or duplicate name.
    pub(super) fn name_error(&self, feeds: &[(&str, Feed<'_>)]) -> Error {
        let known: Vec<&str> =
            self.base.inputs.iter().chain(&self.overridable).map(|info| info.name.as_str()).collect();
        let mut names: Vec<&str> = feeds.iter().map(|(name, _)| *name).collect();
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
        ordered: OrderedFeeds<'_>,
        fetches: &[Fetch<'_>],
        restricted: bool,
        deliver: Option<&mut Deliver<'_>>,
    ) -> Result<Vec<Option<Value>>> {
        let count = self.outputs.len();
        if let Some(fetch) = fetches.iter().find(|fetch| fetch.output >= count) {
            let position = fetch.output;
            return Err(Error::Argument(format!(
                "output index {position} is out of range: the model has {count} outputs"
            )));
        }
        check_output_buffers(&self.outputs, fetches)?;
        let OrderedFeeds { overridden, feeds } = ordered;
        self.make_variant(&overridden)?;
        let variant = variant_of(&mut self.base, &mut self.variants, &overridden);
        check_feeds(variant, &feeds)?;

        // Split into values to read in place, values to copy first, and sequences.
        let device = self.backend.device();
        let is_elsewhere = |lent: &Lent<'_>| lent.memory.device() != device;
        let copy = |(k, feed): (usize, &Feed<'_>)| match feed {
            Feed::Lent(lent) if is_elsewhere(lent) || variant.needs_copy(k, lent, fetches) => {
                copy_tensor(feed)
            }
            _ => Ok(None),
        };
        let copies: Vec<Option<Tensor>> = feeds.iter().enumerate().map(copy).collect::<Result<_>>()?;
        let (mut tensors, mut sequences, mut lent) = (Vec::new(), Sequences::new(), Vec::new());
        let mut key = PreparedKey {
            selected_outputs: restricted.then(|| fetches.iter().map(|fetch| fetch.output).collect()),
            ..PreparedKey::default()
        };
        for (k, (feed, copy)) in feeds.iter().zip(&copies).enumerate() {
            match (feed, copy) {
                (_, Some(tensor)) => tensors.push(RunInput::from(tensor)),
                (Feed::Tensor(input), None) => tensors.push(*input),
                (Feed::Lent(value), None) => {
                    key.lent.push((k, value.dims.to_vec()));
                    lent.push(&**value.memory);
                }
                (Feed::Sequence(several), None) => {
                    key.shapes.push(several.iter().map(|tensor| tensor.dims().to_vec()).collect());
                    sequences.push((variant.inputs[k].dtype, *several));
                }
            }
        }
        key.overridden = overridden;
        let at = self.prepared_index(&key)?;
        // Preparation found that nodes update some of these values in place: such values are copied after
        // all.
        if self.prepared[at].key != key {
            let PreparedKey { overridden, .. } = key;
            return self.run_ordered(OrderedFeeds { overridden, feeds }, fetches, restricted, deliver);
        }
        let values = (&tensors[..], &sequences, &lent[..]);
        self.run_prepared(at, values, fetches, deliver).map_err(|error| match lent.is_empty() {
            true => error,
            false => self.explain_with_copies(error, &feeds, &key),
        })
    }

    pub(super) fn run_prepared(
        &mut self,
        at: usize,
        (tensors, sequences, lent): (&[RunInput<'_>], &Sequences<'_>, &[&Memory]),
        fetches: &[Fetch<'_>],
        mut deliver: Option<&mut Deliver<'_>>,
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
        let origin = |k: usize, fetch: &Fetch<'_>| origins[if restricted { k } else { fetch.output }];
        let sources: Vec<Origin> = fetches.iter().enumerate().map(|(k, fetch)| origin(k, fetch)).collect();
        let mut sure = true;
        if fetches.iter().any(|fetch| fetch.into.is_some()) {
            let known = self.known_output_shapes(at, tensors)?;
            for (fetch, source) in fetches.iter().zip(&sources) {
                let (Some(into), &Origin::Delivered(position)) = (&fetch.into, source) else { continue };
                match &known[position] {
                    Some(dims) => check_output_buffer(&self.outputs[fetch.output], into, dims)?,
                    None => sure = false,
                }
            }
        }
        let mut delivered: Vec<Option<Tensor>> = vec![None; fetches.len()];
        self.execute(at, tensors, lent, &mut |result_index, dtype, dims, value| {
            let bytes = dims.iter().product::<usize>() * dtype.size();
            for (k, fetch) in fetches.iter().enumerate() {
                match (&sources[k], &fetch.into) {
                    (Origin::Delivered(of), Some(into)) if *of == result_index && sure => {
                        value.write_to(into.memory, bytes)?;
                    }
                    (Origin::Delivered(of), into) if *of == result_index => match &mut deliver {
                        Some(deliver) if into.is_none() => deliver(k, dtype, dims, value)?,
                        _ => delivered[k] = Some(value.to_tensor(dtype, dims)?),
                    },
                    _ => {}
                }
            }
            Ok(())
        })?;
        if !sure {
            for (fetch, result) in fetches.iter().zip(&delivered) {
                if let (Some(into), Some(result)) = (&fetch.into, result) {
                    check_output_buffer(&self.outputs[fetch.output], into, result.dims())?;
                }
            }
            for (fetch, result) in fetches.iter().zip(&mut delivered) {
                if let (Some(into), Some(result)) = (&fetch.into, result.take_if(|_| fetch.into.is_some())) {
                    into.memory.write(0, result.data())?;
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
        tensors: &[RunInput<'_>],
        lent: &[&Memory],
        deliver: &mut Deliver<'_>,
    ) -> Result<()> {
        let Prepared { key, runners, planes, .. } = &mut self.prepared[at];
        let bound: SmallVec<[&Memory; 32]> = planes.iter().chain(lent.iter().copied()).collect();
        let how = (GradientMode::Accumulate, Scalars::default());
        let start = Instant::now();
        let run = runners.run_traced(&mut self.work, &bound, how, self.trace.as_mut(), tensors, deliver);
        if let (Some(trace), Ok(())) = (&mut self.trace, &run) {
            trace.record_run(start, Instant::now());
        }
        run.map_err(|error| match key.lent.is_empty() {
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
        feeds: &[Feed<'_>],
        key: &PreparedKey,
    ) -> Error {
        let Error::Run(RunError::OverLimit(_)) = &error else { return error };
        let copies: Vec<Tensor> = feeds.iter().filter_map(|feed| copy_tensor(feed).ok()?).collect();
        let tensors: Vec<RunInput<'_>> = copies.iter().map(RunInput::from).collect();
        let (only, shapes, overridden) =
            (key.selected_outputs.clone(), key.shapes.clone(), key.overridden.clone());
        let Ok(at) = self.prepared_index(&PreparedKey {
            selected_outputs: only,
            shapes,
            overridden,
            lent: Vec::new(),
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
        tensors: &[RunInput<'_>],
    ) -> Result<Vec<Option<Vec<usize>>>> {
        let Prepared { key, runners, .. } = &mut self.prepared[at];
        let shapes = runners.executor(&self.work, tensors).map(|runner| {
            let schedule = runner.schedule();
            let dims =
                |slot: &SlotId| schedule.slots[slot.0 as usize].ty.as_ref().map(|(_, dims)| dims.clone());
            schedule.outputs.iter().map(dims).collect()
        });
        shapes.map_err(|error| match key.lent.is_empty() {
            true => {
                let variant = variant_of(&mut self.base, &mut self.variants, &key.overridden);
                over_limit::explain(error, runners, &variant.signature, &self.work, tensors)
            }
            false => error,
        })
    }
}
