//! Repetition: a schedule that runs several times (Loop and Scan of ONNX).
//!
//! Loop-invariant values are written to planes once, where the programs of the body read them. A body that is a single
//! program uses buffers that are allocated once: its iterations allocate nothing.

use std::fmt;
use std::sync::Arc;

use ortrain_expr::DType;
use ortrain_graph::Tensor;

use crate::output_view::Elements;
use crate::run_context::RunContext;
use crate::{Bindings, Copied, Executable, Memory, Observer, OutOfMemory, RunError, RunPart, Scalars};

/// Axis along which the values of the iterations are stacked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScanAxis {
    /// Axis; a negative axis counts from the end.
    pub axis: i64,
    /// True if the order is reversed: the first iteration has the last value.
    pub reversed: bool,
}

/// Result that collects a value of every iteration.
#[derive(Clone, Debug)]
pub struct StackedResult {
    /// Name.
    pub label: Arc<str>,
    /// Axis and order of the stacked values.
    pub scan_axis: ScanAxis,
    /// Element type, and the known sizes of a value, for a run without iterations.
    pub element: (DType, Option<Vec<Option<usize>>>),
}

/// Iteration count of a repetition.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// One iteration for each element of the scanned values along their axes.
    Scanned,
    /// Iterations while a condition holds. The first input of the body is the index of the iteration. The first result
    /// of the body is the condition of the next iteration.
    While {
        /// True if the first input is the maximum number of iterations.
        has_limit: bool,
        /// True if the next input is the condition of the first iteration.
        has_condition: bool,
    },
}

/// Repeated schedule `B`.
///
/// - Inputs of its segment: limit and initial condition (see [`Count::While`]), initial carried values, scanned
///   values, loop-invariant values.
/// - Inputs of the body: index of the iteration (if there is a condition), carried values, slices of the scanned
///   values, loop-invariant values that are not in planes.
/// - Results of the body: condition (if there is one), carried values, collected values.
/// - Results of the segment: last carried values, collected values.
#[derive(Clone, Debug)]
pub struct Repeat<B> {
    /// Body.
    pub body: Arc<B>,
    /// Iteration count.
    pub count: Count,
    /// Names of the values that each iteration passes to the next one.
    pub carried: Vec<Arc<str>>,
    /// Axes of the scanned values. Each iteration receives a slice.
    pub scanned: Vec<ScanAxis>,
    /// Results that collect a value of every iteration.
    pub stacked: Vec<StackedResult>,
    /// Plane of the first of the last inputs; the others follow.
    pub first_plane: u32,
    /// Number of last inputs that the body reads in planes.
    pub in_planes: usize,
    /// Iteration indices of the unrolled surrounding loops.
    pub unrolled_positions: Vec<u64>,
}

/// Multiplier for the seeds of iterations: an odd number without a bit pattern.
pub const SEED_FACTOR: u64 = 0x2545_F491_4F6C_DD1D;

/// Returns the seed of the random numbers of an iteration. The position is the index along the first scanned value, or
/// the index of the iteration if nothing is scanned. `seed` is the seed outside of the loop.
#[must_use]
pub fn iteration_seed(seed: u64, position: u64) -> u64 {
    seed.wrapping_add(position).wrapping_add(1).wrapping_mul(SEED_FACTOR)
}

impl<B> fmt::Display for Repeat<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.count {
            Count::Scanned => f.write_str("scan")?,
            Count::While { .. } => f.write_str("loop")?,
        }
        write!(f, ", {} carried, {} scanned", self.carried.len(), self.scanned.len())?;
        write!(f, ", {} collected, {} in planes", self.stacked.len(), self.in_planes)
    }
}

impl ScanAxis {
    /// Returns the position of iteration `index` of `count`.
    fn position(self, index: u64, count: u64) -> u64 {
        if self.reversed { count - 1 - index } else { index }
    }

    /// Returns the axis counted from the first of `rank` axes. The error is the axis if it is out of range.
    fn axis_index(self, rank: usize) -> Result<usize, i64> {
        let axis = if self.axis < 0 { self.axis + rank as i64 } else { self.axis };
        usize::try_from(axis).ok().filter(|&axis| axis < rank).ok_or(axis)
    }
}

/// Scanned value: each iteration receives a slice.
struct ScannedInput<'a> {
    tensor: &'a Tensor,
    scan_axis: ScanAxis,
    /// Number of contiguous parts of a slice, number of slices, and bytes of a part.
    slice_layout: (usize, usize, usize),
    /// Shape of a slice.
    dims: Vec<usize>,
}

impl<'a> ScannedInput<'a> {
    fn new(tensor: &'a Tensor, along: ScanAxis) -> Result<ScannedInput<'a>, String> {
        let mut dims = tensor.dims().to_vec();
        let axis = along
            .axis_index(dims.len())
            .map_err(|_| format!("axis {} of {tensor:?} is scanned, but does not exist", along.axis))?;
        let (outer, inner) = (dims[..axis].iter().product(), dims[axis + 1..].iter().product::<usize>());
        let count = dims.remove(axis);
        Ok(ScannedInput {
            tensor,
            scan_axis: along,
            slice_layout: (outer, count, inner * tensor.dtype().size()),
            dims,
        })
    }

    fn bytes(&self) -> usize {
        self.slice_layout.0 * self.slice_layout.2
    }

    fn read(&self, index: u64, to: &mut [u8]) {
        let (outer, count, part) = self.slice_layout;
        let at = self.scan_axis.position(index, count as u64) as usize;
        for k in 0..outer {
            let from = (k * count + at) * part;
            to[k * part..][..part].copy_from_slice(&self.tensor.data()[from..from + part]);
        }
    }

    fn slice(&self, index: u64) -> Result<Tensor, String> {
        let mut bytes = vec![0; self.bytes()];
        self.read(index, &mut bytes);
        tensor(self.tensor.dtype(), self.dims.clone(), bytes)
    }
}

/// Result during collection.
struct StackedBuilder<'a> {
    spec: &'a StackedResult,
    /// Number of iterations, if known.
    total: Option<u64>,
    /// Shape of one value, after the first iteration; then the number of its contiguous parts, and the bytes of a part.
    dims: Option<Vec<usize>>,
    value_layout: (usize, usize),
    data: Vec<u8>,
    done: u64,
}

impl<'a> StackedBuilder<'a> {
    fn new(spec: &'a StackedResult, total: Option<u64>) -> StackedBuilder<'a> {
        StackedBuilder { spec, total, dims: None, value_layout: (0, 0), data: Vec::new(), done: 0 }
    }

    /// Reserves memory for the value of the next iteration, or for all iterations at once if their number is known.
    fn reserve_next(
        &mut self,
        node: &str,
        turn: &mut RunContext<'_, '_>,
        (dtype, dims): (DType, &[usize]),
    ) -> Result<(), RunError> {
        let StackedBuilder { spec: StackedResult { label, scan_axis: along, .. }, done, .. } = self;
        let (error, is_first) = (RunError::host_error(node), self.dims.is_none());
        if let Some(first) = self.dims.as_deref().filter(|&first| first != dims) {
            return Err(error(format!(
                "{label:?} has the shape {dims:?} in iteration {done}, but {first:?} before; \
                 a collected value must keep its shape"
            )));
        }
        if is_first {
            let rank = dims.len() + 1;
            let axis = along.axis_index(rank).map_err(|axis| {
                error(format!("{label:?} is collected along axis {axis}, but has {rank} axes"))
            })?;
            let inner = dims[axis..].iter().product::<usize>() * dtype.size();
            self.value_layout = (dims[..axis].iter().product(), inner);
            self.dims = Some(dims.to_vec());
        }
        let bytes = self.value_layout.0 * self.value_layout.1;
        let more = match self.total {
            Some(total) if is_first => {
                let total_bytes = usize::try_from(total).ok().and_then(|total| bytes.checked_mul(total));
                total_bytes.ok_or(RunError::from(OutOfMemory { bytes: usize::MAX }))?
            }
            Some(_) => return Ok(()),
            None => bytes,
        };
        turn.work.check_intermediates(turn.intermediate_bytes.saturating_add(more))?;
        turn.intermediate_bytes += more;
        let new_len = self.data.len().saturating_add(more);
        self.data.try_reserve(more).map_err(|_| RunError::from(OutOfMemory { bytes: new_len }))?;
        self.data.resize(new_len, 0);
        Ok(())
    }

    /// Writes the value of the next iteration into the reserved memory.
    fn push(&mut self, value: Elements<'_>) -> Result<(), RunError> {
        let (outer, part) = self.value_layout;
        // With an unknown number of iterations, the result grows along the first axis.
        let count = self.total.unwrap_or(self.done + 1);
        let at = self.total.map_or(self.done, |total| self.spec.scan_axis.position(self.done, total));
        for k in 0..outer {
            let to = (k * count as usize + at as usize) * part;
            value.copy_part(k * part, &mut self.data[to..to + part])?;
        }
        self.done += 1;
        Ok(())
    }

    fn finish(self) -> Result<Tensor, String> {
        let StackedResult { label, scan_axis: along, element: (dtype, known) } = self.spec;
        let mut full_dims = match (self.dims, known) {
            (Some(dims), _) => dims,
            // Unknown sizes are zero, as in other runtimes.
            (None, Some(dims)) => dims.iter().map(|size| size.unwrap_or(0)).collect(),
            (None, None) => {
                return Err(format!(
                    "there are no iterations, so the number of axes of {label:?} is unknown; declare its shape"
                ));
            }
        };
        full_dims.insert(along.axis_index(full_dims.len() + 1).unwrap_or(0), self.done as usize);
        tensor(*dtype, full_dims, self.data)
    }
}

/// Creates a tensor from collected elements.
fn tensor(dtype: DType, dims: Vec<usize>, bytes: Vec<u8>) -> Result<Tensor, String> {
    Tensor::new(dtype, dims, bytes.into()).map_err(|error| error.to_string())
}

/// Returns the value of a condition, or a sentence about the fault of the tensor.
pub(crate) fn read_condition(tensor: &Tensor) -> Result<bool, String> {
    match tensor.data().first() {
        Some(&byte) if tensor.dtype() == DType::Bool && tensor.len() == 1 => Ok(byte != 0),
        _ => Err(format!("the condition must be one bool, got {tensor:?}")),
    }
}

/// Prepared schedule that can run several times.
pub(crate) trait RepeatedBody {
    /// Returns the executable, if the schedule is a single program.
    fn single_executable(&self) -> Option<&dyn Executable>;

    /// Runs on tensors, one for each input of the schedule.
    fn run_tensors(
        &self,
        turn: &mut RunContext<'_, '_>,
        input_tensors: Vec<Tensor>,
    ) -> Result<Vec<Tensor>, RunError>;

    /// Returns the name of an input, and its type and shape if known.
    fn input(&self, k: usize) -> (&str, Option<&(DType, Vec<usize>)>);

    /// Returns the type and the shape of an output, if known.
    fn output_type(&self, k: usize) -> Option<&(DType, Vec<usize>)>;
}

impl<B> Repeat<B> {
    /// Runs the repetition.
    pub(crate) fn run(
        &self,
        label: &str,
        body: &dyn RepeatedBody,
        turn: &mut RunContext<'_, '_>,
        inputs: &[Tensor],
    ) -> Result<Vec<Tensor>, RunError> {
        // Loop-invariant values get their own planes after the planes of the state.
        let (inputs, fixed) = inputs.split_at(inputs.len() - self.in_planes);
        let bytes: usize = fixed.iter().map(|tensor| tensor.data().len()).sum();
        turn.work.check_intermediates(turn.intermediate_bytes.saturating_add(bytes))?;
        let mut memories = Vec::with_capacity(fixed.len());
        for tensor in fixed {
            let memory = turn.work.backend().allocate(tensor.data().len(), 0)?;
            memory.write(0, tensor.data())?;
            memories.push(memory);
        }
        let nothing = Memory::new(0);
        let mut planes = turn.bindings.planes.to_vec();
        planes.resize(planes.len().max(self.first_plane as usize + memories.len()), &nothing);
        for (plane, memory) in planes[self.first_plane as usize..].iter_mut().zip(&memories) {
            *plane = memory;
        }
        let bindings = Bindings { planes: &planes };
        let seed =
            self.unrolled_positions.iter().fold(turn.scalars.seed, |seed, &at| iteration_seed(seed, at));
        let scalars = Scalars { seed, ..turn.scalars };
        let observer = turn.observer.as_mut().map(|observer| &mut **observer as &mut dyn Observer);
        let intermediates = turn.intermediate_bytes + bytes;
        let (entry, work) = (turn.entry, &mut *turn.work);
        let mut inner = RunContext {
            bindings: &bindings,
            work,
            entry,
            scalars,
            observer,
            intermediate_bytes: intermediates,
        };
        self.split_inputs(label, body, inputs).map_err(RunError::host_error(label))?.run(&mut inner)
    }

    /// Sorts the inputs into the parts of the repetition.
    fn split_inputs<'a>(
        &'a self,
        label: &'a str,
        body: &'a dyn RepeatedBody,
        inputs: &'a [Tensor],
    ) -> Result<Iterations<'a>, String> {
        let mut rest = inputs.iter();
        let mut next = || rest.next().expect("a segment has the inputs of its loop");
        let (mut holds, mut max_count) = (true, u64::MAX);
        if let Count::While { has_limit: limited, has_condition: condition } = self.count {
            if limited {
                let tensor = next();
                let count = tensor.to_i64().filter(|numbers| numbers.len() == 1);
                let count = count
                    .ok_or_else(|| format!("the number of iterations must be one integer, got {tensor:?}"))?;
                max_count = u64::try_from(count[0]).unwrap_or(0);
            }
            if condition {
                holds = read_condition(next())?;
            }
        }
        let carried = self.carried.iter().map(|_| next()).collect();
        let scanned: Vec<ScannedInput<'_>> =
            self.scanned.iter().map(|&along| ScannedInput::new(next(), along)).collect::<Result<_, _>>()?;
        if self.count == Count::Scanned {
            let counts: Vec<usize> = scanned.iter().map(|source| source.slice_layout.1).collect();
            max_count = counts.first().map_or(0, |&count| count as u64);
            if counts.iter().any(|&count| count as u64 != max_count) {
                return Err(format!("the scanned values must have equal lengths, got {counts:?}"));
            }
        }
        let total = (self.count == Count::Scanned).then_some(max_count);
        let stacks = self.stacked.iter().map(|spec| StackedBuilder::new(spec, total)).collect();
        let (lead, names, passed) = (usize::from(total.is_none()), &self.carried[..], rest.collect());
        Ok(Iterations {
            label,
            body,
            leading_values: lead,
            names,
            holds,
            max_iterations: max_count,
            carried,
            scanned,
            invariants: passed,
            stacks,
        })
    }
}

/// Iterations of a repetition, and their inputs.
struct Iterations<'a> {
    label: &'a str,
    body: &'a dyn RepeatedBody,
    /// Number of iteration-index inputs, and of condition results, of the body: 1 or 0.
    leading_values: usize,
    /// True if the condition holds; then the maximum number of iterations.
    holds: bool,
    max_iterations: u64,
    /// Values that each iteration passes to the next one: names, and initial values.
    names: &'a [Arc<str>],
    carried: Vec<&'a Tensor>,
    scanned: Vec<ScannedInput<'a>>,
    /// Loop-invariant inputs.
    invariants: Vec<&'a Tensor>,
    stacks: Vec<StackedBuilder<'a>>,
}

impl Iterations<'_> {
    /// Runs all iterations and returns the results.
    fn run(mut self, turn: &mut RunContext<'_, '_>) -> Result<Vec<Tensor>, RunError> {
        let error = RunError::host_error(self.label);
        let mut results = match self.body.single_executable() {
            Some(executable) => {
                let mut buffers = self.input_buffers(executable).map_err(&error)?;
                self.run_iterations(turn, |run, turn, index| {
                    run.run_program(turn, executable, &mut buffers, index)
                })?;
                let last = buffers.into_iter().skip(self.leading_values).zip(&self.carried);
                last.map(|(bytes, first)| tensor(first.dtype(), first.dims().to_vec(), bytes))
                    .collect::<Result<Vec<_>, _>>()
                    .map_err(&error)?
            }
            None => {
                let mut carried: Vec<Tensor> = self.carried.iter().copied().cloned().collect();
                self.run_iterations(turn, |run, turn, index| run.run_body(turn, &mut carried, index))?;
                carried
            }
        };
        for stack in self.stacks {
            results.push(stack.finish().map_err(&error)?);
        }
        Ok(results)
    }

    /// Runs iterations until the condition fails or the maximum is reached.
    fn run_iterations(
        &mut self,
        turn: &mut RunContext<'_, '_>,
        mut iteration: impl FnMut(&mut Self, &mut RunContext<'_, '_>, u64) -> Result<(), RunError>,
    ) -> Result<(), RunError> {
        let (base, limit) = (turn.scalars.seed, turn.work.iterations);
        let mut index = 0;
        while self.holds && index < self.max_iterations {
            if index >= limit {
                return Err(RunError::Iterations { node: self.label.to_owned(), limit });
            }
            let position = |source: &ScannedInput<'_>| source.scan_axis.position(index, self.max_iterations);
            turn.scalars.seed = iteration_seed(base, self.scanned.first().map_or(index, position));
            iteration(self, turn, index)?;
            index += 1;
        }
        Ok(())
    }

    /// Returns buffers for the inputs of a body that is a single program. Carried and loop-invariant values are already
    /// written.
    fn input_buffers(&self, executable: &dyn Executable) -> Result<Vec<Vec<u8>>, String> {
        let Iterations { leading_values: lead, carried, scanned, invariants: passed, .. } = self;
        let mut buffers = vec![vec![0; size_of::<u64>()]; *lead];
        buffers.extend(carried.iter().map(|tensor| tensor.data().to_vec()));
        buffers.extend(scanned.iter().map(|source| vec![0; source.bytes()]));
        buffers.extend(passed.iter().map(|tensor| tensor.data().to_vec()));
        let program = executable.program();
        for (k, (&id, bytes)) in program.inputs.iter().zip(&buffers).enumerate() {
            let (actual, expected) = (bytes.len(), program.buffer(id).bytes());
            if actual != expected {
                let (name, _) = self.body.input(k);
                return Err(format!("its body expects {expected} bytes for {name:?}, got {actual}"));
            }
        }
        for ((&id, bytes), name) in program.outputs[*lead..].iter().zip(&buffers[*lead..]).zip(self.names) {
            let (actual, expected) = (program.buffer(id).bytes(), bytes.len());
            if actual != expected {
                return Err(format!("its body must return {expected} bytes for {name:?}, got {actual}"));
            }
        }
        Ok(buffers)
    }

    /// Runs an iteration of a body that is a single program.
    fn run_program(
        &mut self,
        turn: &mut RunContext<'_, '_>,
        executable: &dyn Executable,
        buffers: &mut [Vec<u8>],
        index: u64,
    ) -> Result<(), RunError> {
        let (iteration, rest) = buffers.split_at_mut(self.leading_values);
        iteration.iter_mut().for_each(|bytes| bytes.copy_from_slice(&index.to_le_bytes()));
        for (source, buffer) in self.scanned.iter().zip(&mut rest[self.carried.len()..]) {
            source.read(index, buffer);
        }
        turn.run(executable, RunPart::Full, buffers.iter().map(|buffer| buffer[..].into()))?;
        let program = executable.program();
        let (condition, outputs) = program.outputs.split_at(self.leading_values);
        let (carried, collected) = outputs.split_at(self.carried.len());
        let mut holds = [1];
        for &id in condition {
            turn.result(program, id).copy_to(&mut holds)?;
        }
        self.holds = holds != [0];
        let start = turn.start_timer();
        let mut copied = 0;
        for (&id, buffer) in carried.iter().zip(&mut buffers[self.leading_values..]) {
            turn.result(program, id).copy_to(buffer)?;
            copied += buffer.len();
        }
        let first = self.leading_values + carried.len();
        for (k, (&id, stack)) in collected.iter().zip(&mut self.stacks).enumerate() {
            let Some((dtype, dims)) = self.body.output_type(first + k) else { continue };
            copied += program.buffer(id).bytes();
            stack.reserve_next(self.label, turn, (*dtype, dims))?;
            stack.push(turn.result(program, id))?;
        }
        turn.record_copy(Copied::Outputs, copied, start);
        Ok(())
    }

    /// Runs an iteration of any other body.
    fn run_body(
        &mut self,
        turn: &mut RunContext<'_, '_>,
        carried: &mut [Tensor],
        index: u64,
    ) -> Result<(), RunError> {
        let (error, lead) = (RunError::host_error(self.label), self.leading_values);
        let iteration_tensor = |k| {
            let dims = self.body.input(k).1.map_or(&[][..], |(_, dims)| dims);
            Tensor::i64(dims, &[index as i64])
        };
        let mut inputs: Vec<Tensor> =
            (0..lead).map(iteration_tensor).chain(carried.iter().cloned()).collect();
        for source in &self.scanned {
            inputs.push(source.slice(index).map_err(&error)?);
        }
        inputs.extend(self.invariants.iter().copied().cloned());
        let mut results = self.body.run_tensors(turn, inputs)?.into_iter();
        if lead == 1 {
            let condition = read_condition(&results.next().expect("a body returns its condition"));
            self.holds = condition.map_err(&error)?;
        }
        for (k, (value, name)) in carried.iter_mut().zip(self.names).enumerate() {
            let tensor = results.next().expect("a body returns its carried values");
            if let (_, Some((_, dims))) = self.body.input(lead + k)
                && dims != tensor.dims()
            {
                return Err(error(format!(
                    "iteration {index} returns {name:?} with the shape {:?}, expected {dims:?}",
                    tensor.dims()
                )));
            }
            let (before, bytes) = (value.data().len(), tensor.data().len());
            let max_bytes = turn.work.max_growing_bytes();
            if bytes > before && bytes > max_bytes {
                let (node, value) = (self.label.to_owned(), name.to_string());
                return Err(RunError::Growing { node, value, iteration: index, bytes, max_bytes });
            }
            *value = tensor;
        }
        for (tensor, stack) in results.zip(&mut self.stacks) {
            stack.reserve_next(self.label, turn, (tensor.dtype(), tensor.dims()))?;
            stack.push(Elements::Tensor(&tensor))?;
        }
        Ok(())
    }
}
