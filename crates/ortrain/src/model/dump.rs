//! Text of every compilation stage from the file to its instructions.

use ortrain_codegen::{Caps, CudaC, Dialect, Unsupported, Wgsl, lower, split_host_part};
use ortrain_cpu::Cpu;
use ortrain_graph::{DType, Dim, Graph, Tensor, ValueId, ValueType, byte_length, onnx_text};
use ortrain_ops::passes::{differentiate::backpropagate, functions::unwrap_gradients, infer::infer};
use ortrain_ops::{PartTensor, PlanePart, Role, Specialiser};
use ortrain_program::{
    ALIGNMENT, Backend, LOWERED, PASSES, PassLog, PassRecord, PlaneId, Schedule, UnsupportedOnBackend, align,
};

use crate::model::graph::graph_of;
use crate::state::gradient_names::{RESET_FLAG, parameter_of_gradient};
use crate::suggest::hint;
use crate::train::optimizer::graph_over_planes;
use crate::{Error, ModelSource, Result};

/// Stage to print.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{Stage, dump};
///
/// let graph = dump(setup::MODEL.into(), Stage::Graph, &[])?;
/// let gradient = dump(setup::MODEL.into(), Stage::Gradient, &[])?;
/// assert!(gradient.lines().count() > graph.lines().count());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Stage {
    /// The model as read, in the text syntax of ONNX.
    Onnx,
    /// The graph: newest operator versions, all types inferred.
    Graph,
    /// The graph with the gradients of its first output with respect to every float initializer. If that
    /// output is no scalar, its own gradient is an additional input. A training model already has its
    /// gradients.
    Gradient,
    /// Each program before the first pass, as the operators lower it.
    Lowered,
    /// The schedule: its programs with their instructions, buffers, offsets and peak bytes.
    Program,
    /// The memory plan of each program: offset, bytes and live range of each buffer of the arena.
    Memory,
    /// The kernel that this processor selects for each instruction. `ORTRAIN_ISA` caps the instruction set.
    CpuKernels,
    /// Each program as GPU launches, and the WGSL of their kernels, with the limits that every device
    /// guarantees.
    Kernels,
    /// Each program as launches of NVIDIA's GPUs, and the CUDA C of their kernels.
    CudaKernels,
    /// Each program after the pass of this name. [`Stage::Passes`] lists them.
    Pass(&'static str),
    /// Description of each pass, and the number of its changes in each program.
    Passes,
}

impl Stage {
    /// Returns the stage of this name: `onnx`, `graph`, `gradient`, `lowered`, `program`, `memory`,
    /// `cpu_kernels`, `kernels`, `cuda_kernels`, `passes`, or the name of a pass.
    ///
    /// ```
    /// use ortrain::Stage;
    ///
    /// assert_eq!(Stage::from_name("fusion")?, Stage::Pass("fusion"));
    /// assert!(Stage::from_name("fusoin").unwrap_err().to_string().contains("fusion"));
    /// # Ok::<(), ortrain::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Argument`] for another name.
    pub fn from_name(name: &str) -> Result<Stage> {
        let passes = PASSES.iter().map(|pass| (pass.name, Stage::Pass(pass.name)));
        let stages: Vec<(&str, Stage)> = NAMED_STAGES.into_iter().chain(passes).collect();
        if let Some(&(_, stage)) = stages.iter().find(|&&(known, _)| known == name) {
            return Ok(stage);
        }
        let names: Vec<&str> = stages.into_iter().map(|(name, _)| name).collect();
        let (stage_names, passes) = names.split_at(NAMED_STAGES.len());
        Err(Error::Argument(format!(
            "there is no stage {name:?}; stages are {}, and each pass: {}{}",
            stage_names.join(", "),
            passes.join(", "),
            hint(name, names.iter().copied())
        )))
    }

    /// Returns true if the stage needs compiled programs.
    fn needs_programs(self) -> bool {
        !matches!(self, Stage::Onnx | Stage::Graph | Stage::Gradient)
    }
}

/// Stages with a fixed name, in the order of compilation.
const NAMED_STAGES: [(&str, Stage); 10] = [
    ("onnx", Stage::Onnx),
    ("graph", Stage::Graph),
    ("gradient", Stage::Gradient),
    ("lowered", Stage::Lowered),
    ("program", Stage::Program),
    ("memory", Stage::Memory),
    ("cpu_kernels", Stage::CpuKernels),
    ("kernels", Stage::Kernels),
    ("cuda_kernels", Stage::CudaKernels),
    ("passes", Stage::Passes),
];

/// Prints a stage of a model. For stages of programs, `shapes` gives the shapes of inputs by name.
///
/// Symbolic sizes that `shapes` does not determine are 1. Input values that decide a shape are zeros.
///
/// ```
/// # mod setup { include!(concat!(env!("CARGO_MANIFEST_DIR"), "/doc/setup.rs")); }
/// use ortrain::{Stage, dump};
///
/// let text = dump(setup::MODEL.into(), Stage::Program, &[("x".into(), vec![32, 64])])?;
/// assert!(text.contains("MatMul"));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If the model cannot be compiled up to the stage.
pub fn dump(model: ModelSource, stage: Stage, shapes: &[(String, Vec<usize>)]) -> Result<String> {
    if stage == Stage::Onnx {
        return Ok(onnx_text(&model.read()?.0));
    }
    let label = model.label("the model");
    let gradients = stage == Stage::Gradient;
    let model = if gradients { model.load_for_gradients()? } else { model.load()? };
    if let (Some((graph, scalars)), false) = (graph_over_planes(&label, &model), gradients) {
        return match stage.needs_programs() {
            true => print_program(&label, stage, graph, shapes, false, &scalars),
            false => Ok(graph.to_string()),
        };
    }
    let mut graph = graph_of(&label, &model)?;
    infer(&mut graph).map_err(|source| Error::model(&label, source))?;
    let training = graph.inputs.iter().any(|&id| graph.name_of(id) == RESET_FLAG);
    match stage {
        Stage::Gradient => {
            if !training {
                add_gradients(&label, &mut graph)?;
            }
            let fail = |source| Error::model(&label, source);
            unwrap_gradients(&mut graph).map_err(fail)?;
            infer(&mut graph).map_err(fail)?;
            Ok(graph.to_string())
        }
        stage if stage.needs_programs() => print_program(&label, stage, graph, shapes, training, &[]),
        _ => Ok(graph.to_string()),
    }
}

/// Adds the gradients of the first output with respect to the initializers that it depends on.
fn add_gradients(label: &str, graph: &mut Graph) -> Result<()> {
    let Some(&loss) = graph.outputs.first() else {
        return Err(Error::WrongModel { model: label.to_owned(), reason: "it has no outputs".into() });
    };
    let mut reached = vec![false; graph.value_count()];
    reached[loss.0 as usize] = true;
    for node in graph.nodes.iter().rev() {
        if node.present_outputs().any(|id| reached[id.0 as usize]) {
            node.present_inputs().for_each(|id| reached[id.0 as usize] = true);
        }
    }
    let is_weight = |&id: &ValueId| {
        let value = graph.value(id);
        reached[id.0 as usize] && value.constant.is_some() && value.ty.dtype().is_some_and(DType::is_float)
    };
    // A node output is no initializer, even if its content is known.
    let producers = graph.producers();
    let targets: Vec<ValueId> =
        graph.value_ids().filter(is_weight).filter(|id| producers[id.0 as usize].is_none()).collect();
    let fail = |source| Error::model(label, source);
    let scalar = matches!(&graph.value(loss).ty, ValueType::Tensor(_, Some(shape)) if shape.rank() == 0);
    let seed = if scalar {
        let dtype = graph.value(loss).ty.dtype().unwrap_or(DType::F32);
        graph.add_constant(&format!("{}_grad", graph.name_of(loss)), Tensor::scalar(dtype, 1.0))
    } else {
        // The vector of a vector-Jacobian product is an additional input.
        let seed = graph.add_value(&format!("{}_grad", graph.name_of(loss)), graph.value(loss).ty.clone());
        graph.inputs.push(seed);
        seed
    };
    let gradients = backpropagate(graph, &[(loss, seed)], &targets).map_err(fail)?;
    // A value without a gradient (a ratio, a bound) is no weight.
    graph.outputs.extend(gradients.into_iter().flatten());
    Ok(())
}

/// Returns the sizes of the symbols of inputs for the given shapes.
fn sizes_of_symbols<'a>(
    label: &str,
    graph: &'a Graph,
    shapes: &[(String, Vec<usize>)],
) -> Result<Vec<(&'a Dim, usize)>> {
    for (name, _) in shapes {
        if !graph.inputs.iter().any(|&id| graph.name_of(id) == name) {
            return Err(Error::Argument(format!(
                "{label} has no input {name:?}{}",
                hint(name, graph.inputs.iter().map(|&id| graph.name_of(id)))
            )));
        }
    }
    let mut symbols = Vec::new();
    for &id in &graph.inputs {
        let argument = shapes.iter().find(|(name, _)| name == graph.name_of(id));
        let (Some((_, shape)), Some(declared)) = (argument, graph.value(id).ty.shape()) else { continue };
        if shape.len() != declared.rank() {
            return Err(Error::Argument(format!(
                "input {:?} is {}, so the shape {shape:?} does not fit",
                graph.name_of(id),
                graph.value(id).ty
            )));
        }
        symbols.extend(declared.iter().zip(shape.iter().copied()));
    }
    Ok(symbols)
}

/// Returns the roles of the inputs, and the shapes of the inputs that users provide.
fn choose_roles(
    graph: &Graph,
    shapes: &[(String, Vec<usize>)],
    symbols: &[(&Dim, usize)],
    training: bool,
    scalars: &[String],
) -> Result<(Vec<Role>, Vec<Vec<usize>>)> {
    let mut inputs = Vec::new();
    let mut roles = Vec::new();
    // Trainable parameters of a training model and their gradients are stored in planes, as in a run.
    let trained: Vec<&str> = graph
        .inputs
        .iter()
        .filter(|_| training)
        .filter_map(|&id| parameter_of_gradient(graph.name_of(id)))
        .collect();
    let mut plane_ends = [0usize; 2];
    // Sequences are bound to planes of equal size: the element count of the shape for one of them, or 1.
    let is_sequence =
        |name: &str| graph.find(name).is_some_and(|id| matches!(graph.value(id).ty, ValueType::Sequence(_)));
    let counts =
        shapes.iter().filter(|(name, _)| is_sequence(name)).map(|(_, dims)| dims.iter().product::<usize>());
    let elements = counts.max().unwrap_or(1).max(1);
    for &id in &graph.inputs {
        let name = graph.name_of(id);
        if training && name == RESET_FLAG {
            roles.push(Role::ResetFlag);
            continue;
        }
        let shape = shapes.iter().find(|(known, _)| known == name).map(|(_, dims)| dims.clone());
        let (dtype, declared) = match &graph.value(id).ty {
            ValueType::Tensor(dtype, declared) => (dtype, declared),
            ValueType::Sequence(dtype) => {
                let elements = if scalars.iter().any(|scalar| scalar == name) { 1 } else { elements };
                let len = elements.next_multiple_of(ALIGNMENT / dtype.size());
                let plane = PlaneId(roles.len() as u32);
                let tensors = [PartTensor { start: 0, len: elements }].into();
                roles.push(Role::Planes(vec![PlanePart { dtype: *dtype, plane, offset: 0, len, tensors }]));
                continue;
            }
            ValueType::Unknown => {
                return Err(Error::Argument(format!("the type of input {name:?} is not declared")));
            }
        };
        let plane = if parameter_of_gradient(name).is_some_and(|_| training) {
            Some(1)
        } else if trained.contains(&name) {
            Some(0)
        } else {
            None
        };
        let size = |dim: &Dim| {
            let known = symbols.iter().find(|(symbol, _)| *symbol == dim).map(|&(_, size)| size);
            dim.known().or(known).unwrap_or(1)
        };
        let dims =
            shape.or_else(|| declared.as_ref().map(|dims| dims.iter().map(size).collect())).ok_or_else(
                || Error::Argument(format!("the rank of input {name:?} is unknown; give its shape")),
            )?;
        let bytes = byte_length(*dtype, &dims)
            .map_err(|error| Error::Argument(format!("input {name:?}: {error}")))?;
        match plane {
            Some(plane) => {
                roles.push(Role::Plane(PlaneId(plane as u32), plane_ends[plane]));
                plane_ends[plane] = plane_ends[plane].saturating_add(align(bytes));
            }
            None => {
                roles.push(Role::User);
                inputs.push(dims);
            }
        }
    }
    Ok((roles, inputs))
}

/// Prints the schedule of a graph. Sequences in `scalars` have one number for each parameter.
fn print_program(
    label: &str,
    stage: Stage,
    graph: Graph,
    shapes: &[(String, Vec<usize>)],
    training: bool,
    scalars: &[String],
) -> Result<String> {
    let symbols = sizes_of_symbols(label, &graph, shapes)?;
    let (roles, inputs) = choose_roles(&graph, shapes, &symbols, training, scalars)?;
    let log = match stage {
        Stage::Lowered => PassLog::with_text_after(LOWERED).unwrap_or_default(),
        Stage::Pass(name) => PassLog::with_text_after(name)
            .ok_or_else(|| Error::Argument(format!("there is no pass {name:?}")))?,
        _ => PassLog::new(),
    };
    let specialiser = Specialiser::new(graph, roles).log(log.clone());
    let dims: Vec<&[usize]> = inputs.iter().map(Vec::as_slice).collect();
    let schedule = specialiser.schedule_of_shapes(&dims).map_err(|source| Error::model(label, source))?;
    // Printing compiles the programs of branches, which are compiled on demand.
    let program = schedule.to_string();
    match stage {
        Stage::Pass(name) => match pass_texts(&log) {
            texts if texts.is_empty() => Err(Error::Argument(format!(
                "the pass {name:?} did not run: all programs are built during the run, or ORTRAIN_PASSES excludes it"
            ))),
            texts => Ok(texts),
        },
        Stage::Lowered => Ok(pass_texts(&log)),
        Stage::Passes => Ok(pass_changes(&log)),
        Stage::Memory => {
            let plans = schedule.programs().into_iter().map(|program| program.memory_plan_text()).enumerate();
            Ok(plans.map(|(k, plan)| format!("program {k}: {plan}")).collect())
        }
        Stage::CpuKernels => print_cpu_kernels(&schedule),
        Stage::Kernels => print_kernels(&schedule, &Wgsl, &Caps::GUARANTEED, "webgpu"),
        Stage::CudaKernels => {
            let kernels = print_kernels(&schedule, &CudaC, &CudaC::CAPS, "cuda")?;
            Ok(kernels + &print_library_products(&schedule)?)
        }
        _ => Ok(program),
    }
}

/// Prints the kernel that this processor selects for each instruction.
fn print_cpu_kernels(schedule: &Schedule) -> Result<String> {
    let cpu = Cpu::new()?;
    let mut text = String::new();
    for (k, program) in schedule.programs().into_iter().enumerate() {
        text += &format!("program {k}: instruction set {}\n", cpu.level());
        let executable = cpu.compile(program.clone())?;
        for (at, (scheduled, kernel)) in program.instructions.iter().zip(executable.kernels()).enumerate() {
            let name = scheduled.instruction.name();
            text += &format!("  {at:3} {name:10} {kernel}  # {}\n", scheduled.node);
        }
    }
    Ok(text)
}

/// Prints the launches and kernels of the programs of a schedule, in a language for a backend.
fn print_kernels(
    schedule: &Schedule,
    dialect: &dyn Dialect,
    caps: &Caps,
    backend: &'static str,
) -> Result<String> {
    let mut text = String::new();
    for (k, program) in schedule.programs().into_iter().enumerate() {
        let parts = split_host_part(program, dialect);
        let (bindings, checked) = match &parts {
            Some((rest, host)) => (rest, &host.checked[..]),
            None => (&**program, &[][..]),
        };
        let lowered = lower(bindings, checked, caps, dialect).map_err(|unsupported| {
            let Unsupported { node, instruction, reason } = unsupported;
            UnsupportedOnBackend { backend, node, instruction, reason }
        })?;
        if let Some((_, host)) = &parts {
            text += &format!("before program {k}, on the host: {}", host.program);
        }
        text += &format!("program {k}: {}", lowered.text(bindings, dialect));
    }
    match text.is_empty() {
        true => Err(Error::Argument("there are no kernels: all programs are built during the run".into())),
        false => Ok(text),
    }
}

/// Prints the products that cuBLASLt computes on the first device of CUDA. Without a device, prints the rule.
#[cfg(feature = "cuda")]
fn print_library_products(schedule: &Schedule) -> Result<String> {
    let Ok(cuda) = ortrain_cuda::Cuda::open("cuda") else {
        return Ok(format!(
            "on a device of CUDA with cuBLASLt, that library computes products of at least {} multiplications\n",
            ortrain_cuda::MIN_LIBRARY_PRODUCT
        ));
    };
    let mut text = format!("products of cuBLASLt on {}\n", cuda.description());
    for (k, program) in schedule.programs().into_iter().enumerate() {
        let kernels = cuda.describe_kernels(program.clone())?;
        for (at, (scheduled, kernel)) in program.instructions.iter().zip(kernels).enumerate() {
            if kernel.starts_with("cuBLASLt") {
                text += &format!("  program {k}, instruction {at}: {kernel}  # {}\n", scheduled.node);
            }
        }
    }
    Ok(text)
}

#[cfg(not(feature = "cuda"))]
fn print_library_products(_schedule: &Schedule) -> Result<String> {
    Ok(String::new())
}

/// Returns the text of the programs after a pass.
fn pass_texts(log: &PassLog) -> String {
    let programs = log.programs();
    let texts = programs.iter().flatten().filter_map(|record| record.text.as_deref());
    texts.enumerate().map(|(k, text)| format!("program {k}\n{text}")).collect()
}

/// Prints the description of each pass, then the number of its changes and of instructions after it, for each
/// program.
fn pass_changes(log: &PassLog) -> String {
    let width = PASSES.iter().map(|pass| pass.name.len()).max().unwrap_or(0);
    let mut text = String::from("passes, in the order in which they run\n");
    for pass in PASSES {
        text += &format!("  {:width$}  {}\n", pass.name, pass.about);
    }
    for (k, records) in log.programs().iter().enumerate() {
        text += &format!("program {k}\n  {:width$}  changes  instructions\n", "pass");
        for PassRecord { pass, changes, instructions, .. } in records {
            text += &format!("  {pass:width$}  {changes:7}  {instructions:12}\n");
        }
    }
    text
}
