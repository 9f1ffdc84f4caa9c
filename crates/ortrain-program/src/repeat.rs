//! Repetition: a schedule that is run again and again (Loop and Scan of ONNX).
//!
//! Values that stay the same are put into planes once, where the body's programs find them. A body that is one program
//! runs on buffers that are made once: an iteration then allocates nothing.

use std::fmt;
use std::sync::Arc;

use ortrain_expr::DType;
use ortrain_graph::Tensor;

use crate::schedule::Turn;
use crate::{Bindings, Executable, Memory, Observer, OutOfMemory, RunError, Runner, Schedule};

/// An axis along which the values of the iterations lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Along {
    /// The axis; counted from the end if it is negative.
    pub axis: i64,
    /// Whether the value of the first iteration is the last one.
    pub reversed: bool,
}

/// A result that collects a value of every iteration.
#[derive(Clone, Debug)]
pub struct Stacked {
    /// Its name.
    pub label: Arc<str>,
    /// Where the values lie in it.
    pub along: Along,
    /// The element type, and what is known of the shape of one value: for a run without iterations.
    pub element: (DType, Option<Vec<Option<usize>>>),
}

/// How often a schedule is repeated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Count {
    /// Once for each element of the scanned values along their axes.
    Scanned,
    /// While a condition holds. The body is given the number of the iteration first, and its first result is the
    /// condition for the next one.
    While {
        /// Whether the first input is the largest number of iterations.
        most: bool,
        /// Whether the next input is the condition for the first iteration.
        condition: bool,
    },
}

/// A schedule that is repeated. The inputs of its segment are those that [`Count::While`] names, initial values of
/// what is carried, what is scanned, and values that stay the same. The body takes the number of the iteration (if
/// there is a condition), what is carried, slices of what is scanned, and those values that stay the same that are not
/// in planes; it gives the condition, what is carried on, and what is collected. The results are the last carried
/// values and what was collected.
#[derive(Clone, Debug)]
pub struct Repeat {
    /// What is repeated.
    pub body: Arc<Schedule>,
    /// How often.
    pub count: Count,
    /// The names of the values that each iteration hands to the next one.
    pub carried: Vec<Arc<str>>,
    /// Values of which each iteration gets a slice.
    pub scanned: Vec<Along>,
    /// Results that collect a value of every iteration.
    pub stacked: Vec<Stacked>,
    /// The plane in which the body finds the first of the last inputs; the others follow.
    pub first_plane: u32,
    /// How many of the last inputs are found in planes.
    pub in_planes: usize,
    /// The iterations of surrounding loops that this one is a part of, where these were written out.
    pub positions: Vec<u64>,
}

/// What seeds of iterations are multiplied with: an odd number without any pattern.
pub const SEED_FACTOR: u64 = 0x2545_F491_4F6C_DD1D;

/// The seed of the random numbers of one iteration, by where it lies along the first scanned value (or by its number if
/// nothing is scanned). `seed` is that of what is around the loop.
#[must_use]
pub fn iteration_seed(seed: u64, position: u64) -> u64 {
    seed.wrapping_add(position).wrapping_add(1).wrapping_mul(SEED_FACTOR)
}

impl fmt::Display for Repeat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.count {
            Count::Scanned => f.write_str("scan")?,
            Count::While { .. } => f.write_str("loop")?,
        }
        write!(f, ", {} carried, {} scanned", self.carried.len(), self.scanned.len())?;
        write!(f, ", {} collected, {} in planes", self.stacked.len(), self.in_planes)
    }
}

/// A shape around an axis: elements before it, along it, and behind it.
fn around(dims: &[usize], axis: i64) -> Option<(usize, usize, usize)> {
    let axis = if axis < 0 { axis + dims.len() as i64 } else { axis };
    let axis = usize::try_from(axis).ok().filter(|&axis| axis < dims.len())?;
    Some((dims[..axis].iter().product(), dims[axis], dims[axis + 1..].iter().product()))
}

impl Along {
    /// Where iteration `index` of `count` lies.
    fn position(self, index: u64, count: u64) -> u64 {
        if self.reversed { count - 1 - index } else { index }
    }
}

/// A value of which each iteration gets a slice.
struct Source<'a> {
    tensor: &'a Tensor,
    along: Along,
    /// Slices, their number, and the bytes of a part that lies together.
    around: (usize, usize, usize),
    dims: Vec<usize>,
}

impl<'a> Source<'a> {
    fn new(tensor: &'a Tensor, along: Along) -> Result<Source<'a>, String> {
        let (outer, count, inner) = around(tensor.dims(), along.axis)
            .ok_or_else(|| format!("axis {} of {tensor:?} is scanned, but there is none", along.axis))?;
        let mut dims = tensor.dims().to_vec();
        dims.remove(if along.axis < 0 {
            (along.axis + dims.len() as i64) as usize
        } else {
            along.axis as usize
        });
        Ok(Source { tensor, along, around: (outer, count, inner * tensor.dtype().size()), dims })
    }

    fn bytes(&self) -> usize {
        self.around.0 * self.around.2
    }

    fn read(&self, index: u64, to: &mut [u8]) {
        let (outer, count, part) = self.around;
        let at = self.along.position(index, count as u64) as usize;
        for k in 0..outer {
            let from = (k * count + at) * part;
            to[k * part..][..part].copy_from_slice(&self.tensor.data()[from..from + part]);
        }
    }
}

/// A result while it is collected.
struct Stack<'a> {
    spec: &'a Stacked,
    /// The shape of one value, once there is one.
    dims: Option<Vec<usize>>,
    around: (usize, usize),
    data: Vec<u8>,
    done: u64,
}

impl Stack<'_> {
    /// Adds the value of the next iteration; `read` gives its bytes from an offset on. `total` is the number of
    /// iterations, if it is known.
    fn push(
        &mut self,
        turn: &mut Turn<'_, '_>,
        (dtype, dims): (DType, &[usize]),
        total: Option<u64>,
        read: &dyn Fn(&Turn<'_, '_>, usize, &mut [u8]),
    ) -> Result<(), Failure> {
        let known = self.dims.is_some();
        if let Some(first) = &self.dims {
            if first != dims {
                return Err(Failure::Says(format!(
                    "iteration {} gives {:?} the shape {dims:?}, but earlier ones {first:?}; what is collected has one \
                     shape",
                    self.done, self.spec.label
                )));
            }
        } else {
            let axis = self.spec.along.axis;
            let rank = dims.len() as i64 + 1;
            let axis = if axis < 0 { axis + rank } else { axis };
            let axis = usize::try_from(axis).ok().filter(|&axis| axis <= dims.len()).ok_or_else(|| {
                Failure::Says(format!(
                    "{:?} is collected along axis {axis}, but has {rank} axes",
                    self.spec.label
                ))
            })?;
            let inner = dims[axis..].iter().product::<usize>() * dtype.size();
            self.around = (dims[..axis].iter().product(), inner);
            self.dims = Some(dims.to_vec());
        }
        let (outer, part) = self.around;
        let bytes = outer * part;
        match total {
            Some(total) => {
                if !known {
                    let all = usize::try_from(total).ok().and_then(|total| bytes.checked_mul(total));
                    let all = all.ok_or(RunError::Memory(OutOfMemory { bytes: usize::MAX }))?;
                    turn.work.check_between(turn.between.saturating_add(all))?;
                    turn.between += all;
                    self.data
                        .try_reserve_exact(all)
                        .map_err(|_| RunError::Memory(OutOfMemory { bytes: all }))?;
                    self.data.resize(all, 0);
                }
                let at = self.spec.along.position(self.done, total) as usize;
                for k in 0..outer {
                    let to = (k * total as usize + at) * part;
                    read(turn, k * part, &mut self.data[to..to + part]);
                }
            }
            None => {
                // Along the first axis, and the end is not known: it grows.
                turn.work.check_between(turn.between.saturating_add(bytes))?;
                turn.between += bytes;
                let from = self.data.len();
                let grown = self.data.try_reserve(bytes);
                grown.map_err(|_| RunError::Memory(OutOfMemory { bytes: from.saturating_add(bytes) }))?;
                self.data.resize(from + bytes, 0);
                read(turn, 0, &mut self.data[from..]);
            }
        }
        self.done += 1;
        Ok(())
    }

    fn finish(self) -> Result<Tensor, Failure> {
        let spec = self.spec;
        let dims = match (self.dims, &spec.element.1) {
            (Some(dims), _) => dims,
            // As other runtimes do: what nobody knows is empty.
            (None, Some(dims)) => dims.iter().map(|size| size.unwrap_or(0)).collect(),
            (None, None) => {
                return Err(Failure::Says(format!(
                    "nothing is iterated, so the number of axes of {:?} is not known; declare its shape",
                    spec.label
                )));
            }
        };
        let axis =
            if spec.along.axis < 0 { spec.along.axis + dims.len() as i64 + 1 } else { spec.along.axis };
        let mut whole = dims;
        let axis = usize::try_from(axis).ok().filter(|&axis| axis <= whole.len()).unwrap_or(0);
        whole.insert(axis, self.done as usize);
        Tensor::new(spec.element.0, whole, self.data.into()).map_err(|error| Failure::Says(error.to_string()))
    }
}

/// What goes wrong in a repetition.
enum Failure {
    /// A sentence about its node.
    Says(String),
    Run(RunError),
}

impl From<RunError> for Failure {
    fn from(error: RunError) -> Failure {
        Failure::Run(error)
    }
}

impl From<String> for Failure {
    fn from(message: String) -> Failure {
        Failure::Says(message)
    }
}

/// The body with the values that it is given next.
enum Body<'a> {
    /// One program: the bytes of its inputs, what is carried among them.
    Program(&'a dyn Executable, Vec<Vec<u8>>, Vec<Vec<usize>>),
    /// Any schedule.
    Tensors(&'a Runner, Vec<Tensor>),
}

impl Repeat {
    /// Runs it.
    pub(crate) fn run(
        &self,
        label: &str,
        body: &Runner,
        turn: &mut Turn<'_, '_>,
        inputs: &[Tensor],
    ) -> Result<Vec<Tensor>, RunError> {
        // The values that stay the same get planes of their own beside those of the state.
        let (inputs, fixed) = inputs.split_at(inputs.len() - self.in_planes);
        let mut memories = Vec::with_capacity(fixed.len());
        let bytes: usize = fixed.iter().map(|tensor| tensor.data().len()).sum();
        turn.work.check_between(turn.between.saturating_add(bytes))?;
        for tensor in fixed {
            let memory = Memory::try_new(tensor.data().len())?;
            memory.write(0, tensor.data());
            memories.push(memory);
        }
        let nothing = Memory::new(0);
        let mut planes = turn.bindings.planes.to_vec();
        planes.resize(planes.len().max(self.first_plane as usize + memories.len()), &nothing);
        for (k, memory) in memories.iter().enumerate() {
            planes[self.first_plane as usize + k] = memory;
        }
        let bindings = Bindings { planes: &planes };
        let seed = self.positions.iter().fold(turn.scalars.seed, |seed, &at| iteration_seed(seed, at));
        let scalars = crate::Scalars { seed, ..turn.scalars };
        let observer = turn.observer.as_mut().map(|observer| &mut **observer as &mut dyn Observer);
        let between = turn.between + bytes;
        let (entry, work) = (turn.entry, &mut *turn.work);
        let mut inner = Turn { bindings: &bindings, work, entry, scalars, observer, between };
        self.iterate(label, body, &mut inner, inputs).map_err(|failure| match failure {
            Failure::Says(message) => RunError::Host { node: label.to_owned(), message },
            Failure::Run(error) => error,
        })
    }

    fn iterate(
        &self,
        label: &str,
        runner: &Runner,
        turn: &mut Turn<'_, '_>,
        inputs: &[Tensor],
    ) -> Result<Vec<Tensor>, Failure> {
        let mut rest = inputs.iter();
        let mut next = || rest.next().expect("a segment has the inputs that its repetition names");
        let (mut holds, mut most) = (true, u64::MAX);
        if let Count::While { most: limited, condition } = self.count {
            if limited {
                let tensor = next();
                let count = tensor.to_i64().filter(|numbers| numbers.len() == 1);
                let count = count.ok_or_else(|| {
                    format!("the number of iterations is {tensor:?}, but one integer is needed")
                })?;
                most = u64::try_from(count[0]).unwrap_or(0);
            }
            if condition {
                holds = flag(next())?;
            }
        }
        let carried: Vec<&Tensor> = self.carried.iter().map(|_| next()).collect();
        let scanned: Vec<Source<'_>> =
            self.scanned.iter().map(|&along| Source::new(next(), along)).collect::<Result<_, _>>()?;
        let passed: Vec<&Tensor> = rest.collect();
        let mut total = None;
        if self.count == Count::Scanned {
            let counts: Vec<usize> = scanned.iter().map(|source| source.around.1).collect();
            most = counts.first().map_or(0, |&count| count as u64);
            if counts.iter().any(|&count| count as u64 != most) {
                return Err(Failure::Says(format!(
                    "the scanned values have lengths {counts:?}, which differ"
                )));
            }
            total = Some(most);
        }
        let mut stacks: Vec<Stack<'_>> = self
            .stacked
            .iter()
            .map(|spec| Stack { spec, dims: None, around: (0, 0), data: Vec::new(), done: 0 })
            .collect();

        let lead = usize::from(self.count != Count::Scanned);
        let schedule = runner.schedule();
        let spec = |k: usize| &schedule.slots[schedule.inputs[k].0 as usize];
        let number_dims = if lead == 1 {
            spec(0).ty.as_ref().map_or(Vec::new(), |(_, dims)| dims.clone())
        } else {
            Vec::new()
        };
        let mut body = match runner.single() {
            Some(executable) => {
                let mut buffers = vec![vec![0; 8 * lead]; lead];
                let mut dims = Vec::with_capacity(carried.len());
                for tensor in &carried {
                    buffers.push(tensor.data().to_vec());
                    dims.push(tensor.dims().to_vec());
                }
                buffers.extend(scanned.iter().map(|source| vec![0; source.bytes()]));
                buffers.extend(passed.iter().map(|tensor| tensor.data().to_vec()));
                let program = executable.program();
                for (k, (&id, bytes)) in program.inputs.iter().zip(&buffers).enumerate() {
                    if program.buffer(id).bytes() != bytes.len() {
                        let (found, wanted) = (bytes.len(), program.buffer(id).bytes());
                        let name = &spec(k).label;
                        return Err(Failure::Says(format!(
                            "its body takes {wanted} bytes as {name:?}, but is given {found}"
                        )));
                    }
                }
                let outputs = program.outputs[lead..].iter().zip(&buffers[lead..]).zip(&self.carried);
                for ((&id, buffer), name) in outputs {
                    if program.buffer(id).bytes() != buffer.len() {
                        let (found, wanted) = (program.buffer(id).bytes(), buffer.len());
                        return Err(Failure::Says(format!(
                            "its body takes {wanted} bytes as {name:?}, but hands on {found}"
                        )));
                    }
                }
                Body::Program(executable, buffers, dims)
            }
            None => {
                let number = Tensor::i64(&number_dims, &[0]);
                let empty = |source: &Source<'_>| {
                    Tensor::new(source.tensor.dtype(), source.dims.clone(), vec![0; source.bytes()].into())
                };
                let mut tensors: Vec<Tensor> = (0..lead).map(|_| number.clone()).collect();
                tensors.extend(carried.iter().map(|&tensor| tensor.clone()));
                for source in &scanned {
                    tensors.push(empty(source).map_err(|error| error.to_string())?);
                }
                tensors.extend(passed.iter().map(|&tensor| tensor.clone()));
                Body::Tensors(runner, tensors)
            }
        };
        let base = turn.scalars.seed;
        let mut index = 0u64;
        while holds && index < most {
            if index >= turn.work.most_iterations() {
                let limit = turn.work.most_iterations();
                return Err(RunError::Iterations { node: label.to_owned(), limit }.into());
            }
            let position = scanned.first().map_or(index, |source| source.along.position(index, most));
            turn.scalars.seed = iteration_seed(base, position);
            match &mut body {
                Body::Program(executable, buffers, dims) => {
                    if lead == 1 {
                        buffers[0].copy_from_slice(&index.to_le_bytes());
                    }
                    for (source, buffer) in scanned.iter().zip(&mut buffers[lead + dims.len()..]) {
                        source.read(index, buffer);
                    }
                    turn.program(*executable, buffers.iter().map(Vec::as_slice))?;
                    let program = executable.program();
                    if lead == 1 {
                        let mut byte = [0];
                        turn.result(program, program.outputs[0]).copy_to(&mut byte);
                        holds = byte[0] != 0;
                    }
                    let start = turn.start();
                    let mut copied = 0;
                    let outputs = &program.outputs[lead..];
                    for (&id, buffer) in outputs.iter().zip(&mut buffers[lead..lead + dims.len()]) {
                        turn.result(program, id).copy_to(buffer);
                        copied += buffer.len();
                    }
                    let slots = &schedule.outputs[lead + dims.len()..];
                    for ((&id, slot), stack) in outputs[dims.len()..].iter().zip(slots).zip(&mut stacks) {
                        let Some((dtype, dims)) = &schedule.slots[slot.0 as usize].ty else { continue };
                        copied += program.buffer(id).bytes();
                        stack.push(turn, (*dtype, dims), total, &|turn, from, bytes| {
                            turn.result(program, id).copy_part(from, bytes);
                        })?;
                    }
                    turn.copied(crate::Copied::Outputs, copied, start);
                }
                Body::Tensors(runner, tensors) => {
                    if lead == 1 {
                        tensors[0] = Tensor::i64(&number_dims, &[index as i64]);
                    }
                    for (k, source) in scanned.iter().enumerate() {
                        let mut bytes = vec![0; source.bytes()];
                        source.read(index, &mut bytes);
                        tensors[lead + carried.len() + k] =
                            Tensor::new(source.tensor.dtype(), source.dims.clone(), bytes.into())
                                .map_err(|error| error.to_string())?;
                    }
                    let mut results = runner.run_tensors(turn, tensors.clone())?.into_iter();
                    if lead == 1 {
                        holds = flag(&results.next().expect("a body gives its condition"))?;
                    }
                    for k in 0..carried.len() {
                        let tensor = results.next().expect("a body gives what it carries on");
                        if let Some((_, dims)) = &spec(lead + k).ty
                            && dims != tensor.dims()
                        {
                            return Err(Failure::Says(format!(
                                "iteration {index} makes {:?} {:?}, but it has the shape {dims:?}",
                                self.carried[k],
                                tensor.dims()
                            )));
                        }
                        let (before, after) = (tensors[lead + k].data().len(), tensor.data().len());
                        let most = turn.work.most_grown();
                        if after > before && after > most {
                            return Err(RunError::Growing {
                                node: label.to_owned(),
                                value: self.carried[k].to_string(),
                                iteration: index,
                                bytes: after,
                                most,
                            }
                            .into());
                        }
                        tensors[lead + k] = tensor;
                    }
                    for (tensor, stack) in results.zip(&mut stacks) {
                        let value = (tensor.dtype(), tensor.dims());
                        stack.push(turn, value, total, &|_, from, bytes| {
                            bytes.copy_from_slice(&tensor.data()[from..from + bytes.len()]);
                        })?;
                    }
                }
            }
            index += 1;
        }
        turn.scalars.seed = base;
        let mut results = Vec::with_capacity(carried.len() + stacks.len());
        match body {
            Body::Program(_, buffers, dims) => {
                let buffers = buffers.into_iter().skip(lead);
                for ((buffer, dims), tensor) in buffers.zip(dims).zip(&carried) {
                    let value = Tensor::new(tensor.dtype(), dims, buffer.into());
                    results.push(value.map_err(|error| error.to_string())?);
                }
            }
            Body::Tensors(_, tensors) => {
                results.extend(tensors.into_iter().skip(lead).take(carried.len()));
            }
        }
        for stack in stacks {
            results.push(stack.finish()?);
        }
        Ok(results)
    }
}

/// A condition.
fn flag(tensor: &Tensor) -> Result<bool, Failure> {
    match tensor.data().first() {
        Some(&byte) if tensor.dtype() == DType::Bool && tensor.len() == 1 => Ok(byte != 0),
        _ => Err(Failure::Says(format!("the condition is {tensor:?}, but one bool is needed"))),
    }
}
