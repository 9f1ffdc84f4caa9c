//! Programs compiled to kernels.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use ortrain_expr::{Access, OutOfRange};
use ortrain_kernels::{
    AttentionDesc, AttentionKernel, Bf16Unit, Compiler, ConvDesc, ConvKernel, GemmDesc, GemmKernel,
    NestKernel, Pool, Products, QuantizedRight, RunScalars, ScatterDesc, ScatterKernel, Scratch, WindowDesc,
    WindowKernel, with_shared_code,
};
use ortrain_program::{
    Attention, AttentionPass, Bindings, BufferId, BufferLocation, Executable, GradientMode, Instruction,
    IntegerProduct, IntegerShape, Interrupt, InterruptPoints, Nest, NestGroup, Observer, Precision, Program,
    RunError, RunPart, Scalars, UnsupportedOnBackend, Watch, Workspace, interruptible,
};

use crate::addresses::{Addresses, host_memory};
use crate::prefault::prefault;
use crate::settings::Settings;

/// Compiled instruction.
#[derive(Debug)]
enum Kernel {
    Nest(Box<NestKernel>),
    NestGroup(GroupKernel),
    MatMul(GemmKernel),
    Conv(ConvKernel),
    Attention(AttentionKernel, Vec<BufferId>),
    Window(Box<WindowKernel>),
    Scatter(ScatterKernel),
    Yield,
}

/// Kernels of a group, and the index of the kernel of each nest. Nests that differ only in their buffers share a
/// kernel.
#[derive(Debug, Default)]
struct GroupKernel {
    kernels: Vec<NestKernel>,
    kernel_of_nest: Vec<usize>,
}

impl GroupKernel {
    fn new(program: &Program, group: &NestGroup, compiler: Compiler<'_>) -> Result<GroupKernel, String> {
        let mut group_kernel = GroupKernel::default();
        let mut known: HashMap<(ortrain_expr::Nest, Vec<bool>), usize> = HashMap::new();
        for nest in &group.nests {
            let kind = (nest_of_accesses(nest), overlapping_pairs(program, nest));
            let kernel = match known.get(&kind) {
                Some(&kernel) => kernel,
                None => {
                    group_kernel.kernels.push(compile_nest(program, nest, compiler)?);
                    known.insert(kind, group_kernel.kernels.len() - 1);
                    group_kernel.kernels.len() - 1
                }
            };
            group_kernel.kernel_of_nest.push(kernel);
        }
        Ok(group_kernel)
    }

    /// Iterates over the kernel of each nest.
    fn kernel_of_each_nest(&self) -> impl Iterator<Item = &NestKernel> {
        self.kernel_of_nest.iter().map(|&kernel| &self.kernels[kernel])
    }
}

/// Returns for each pair of a store and a load, in row-major order, true if their buffers may share elements.
fn overlapping_pairs(program: &Program, nest: &Nest) -> Vec<bool> {
    let stores = nest.stores.iter();
    stores
        .flat_map(|to| nest.load_operands().map(|from| program.buffers_overlap(to.buffer, from.buffer)))
        .collect()
}

/// Compiles a nest. The kernel chooses the order of sums: for short rows it is faster to reduce along columns.
fn compile_nest(program: &Program, nest: &Nest, compiler: Compiler<'_>) -> Result<NestKernel, String> {
    let (overlaps, loads) = (overlapping_pairs(program, nest), nest.load_operands().count());
    NestKernel::in_place(&nest_of_accesses(nest), compiler, &|store, load| overlaps[store * loads + load])
}

impl Kernel {
    fn new(
        program: &Program,
        instruction: &Instruction,
        compiler: Compiler<'_>,
        bf16: Option<Bf16Unit>,
    ) -> Result<Kernel, String> {
        let products = match (instruction.precision(), bf16) {
            (Precision::F32, _) => Products::F32,
            (precision, Some(unit)) => Products { precision, unit },
            (precision, None) => {
                return Err(format!("its factors are {precision}, but no bfloat16 unit was selected"));
            }
        };
        match instruction {
            Instruction::Nest(nest) => {
                compile_nest(program, nest, compiler).map(|kernel| Kernel::Nest(Box::new(kernel)))
            }
            Instruction::NestGroup(group) => {
                GroupKernel::new(program, group, compiler).map(Kernel::NestGroup)
            }
            Instruction::MatMul(m) => {
                let desc = GemmDesc {
                    k: m.k,
                    a: m.a.access.clone(),
                    b: m.b.access.clone(),
                    quantized: None,
                    zero_points: [None, None],
                    rounded_to: m.rounded,
                    products,
                    epilogue: nest_of_accesses(&m.epilogue),
                };
                GemmKernel::new(&desc, compiler).map(Kernel::MatMul)
            }
            Instruction::QuantizedMatMul(m) => {
                let quantized =
                    QuantizedRight { matrix: m.b.matrix, has_zero_points: m.b.zero_points.is_some() };
                let desc = GemmDesc {
                    k: m.k,
                    a: m.a.access.clone(),
                    b: m.b.access(),
                    quantized: Some(quantized),
                    zero_points: [None, None],
                    rounded_to: [None, m.b.rounded],
                    products,
                    epilogue: nest_of_accesses(&m.epilogue),
                };
                GemmKernel::new(&desc, compiler).map(Kernel::MatMul)
            }
            Instruction::Conv(c) => {
                let [a, b] = [&c.a, &c.b].map(|operand| operand.access.dtype);
                let (shape, epilogue) = (c.shape.clone(), nest_of_accesses(&c.epilogue));
                let desc = ConvDesc { shape, a, b, zero_points: [None; 2], products, epilogue };
                ConvKernel::new(&desc, compiler).map(Kernel::Conv)
            }
            Instruction::IntegerProduct(p) => compile_integer_product(p, compiler),
            Instruction::Attention(a) => AttentionKernel::new(&attention_desc(a), compiler)
                .map(|kernel| Kernel::Attention(kernel, a.buffers())),
            Instruction::Window(w) => {
                let dtype = w.target.access.dtype;
                let index = w.index.as_ref().map(|index| (index.kind, index.operand.access.dtype));
                let desc = WindowDesc { shape: w.shape.clone(), dtype, index };
                WindowKernel::new(&desc, compiler).map(|kernel| Kernel::Window(Box::new(kernel)))
            }
            Instruction::ScatterAdd(s) => {
                let desc = ScatterDesc {
                    outer: s.outer,
                    size: s.rows,
                    count: s.count,
                    inner: s.inner,
                    dtype: s.target.access.dtype,
                    index: s.index.access.dtype,
                    overwrites: s.overwrites,
                };
                ScatterKernel::new(desc, compiler.isa()).map(Kernel::Scatter)
            }
            Instruction::Yield(_) => Ok(Kernel::Yield),
        }
    }

    /// Describes the algorithm of the kernel.
    fn describe(&self) -> String {
        match self {
            Kernel::Nest(kernel) => kernel.describe(),
            Kernel::NestGroup(group) => {
                let (nests, kernels) = (group.kernel_of_nest.len(), group.kernels.len());
                let each: Vec<String> = group.kernels.iter().map(NestKernel::describe).collect();
                format!("{nests} nests, {kernels} kernels: {}", each.join("; "))
            }
            Kernel::MatMul(kernel) => kernel.describe(),
            Kernel::Conv(kernel) => kernel.describe(),
            Kernel::Attention(kernel, _) => kernel.describe(),
            Kernel::Window(kernel) => kernel.describe().to_owned(),
            Kernel::Scatter(kernel) => kernel.describe().to_owned(),
            Kernel::Yield => "return to the caller".to_owned(),
        }
    }

    fn scratch_bytes(&self, threads: usize) -> usize {
        match self {
            Kernel::Nest(kernel) => kernel.scratch_bytes(threads),
            Kernel::NestGroup(group) => {
                group.kernels.iter().map(|kernel| kernel.scratch_bytes(threads)).max().unwrap_or(0)
            }
            Kernel::MatMul(kernel) => kernel.scratch_bytes(threads),
            Kernel::Conv(kernel) => kernel.scratch_bytes(threads),
            Kernel::Attention(kernel, _) => kernel.scratch_bytes(threads),
            Kernel::Window(kernel) => kernel.scratch_bytes(threads),
            Kernel::Scatter(_) | Kernel::Yield => 0,
        }
    }
}

/// Compiles a product of bytes.
fn compile_integer_product(product: &IntegerProduct, compiler: Compiler<'_>) -> Result<Kernel, String> {
    let IntegerProduct { shape, a, b, zero_points, epilogue } = product;
    let (products, epilogue) = (Products::F32, nest_of_accesses(epilogue));
    match shape {
        IntegerShape::Matrices { k, .. } => {
            let desc = GemmDesc {
                k: *k,
                a: a.access.clone(),
                b: b.access.clone(),
                quantized: None,
                zero_points: zero_points.each_ref().map(|operand| Some(operand.as_ref()?.access.clone())),
                rounded_to: [None; 2],
                products,
                epilogue,
            };
            GemmKernel::new(&desc, compiler).map(Kernel::MatMul)
        }
        IntegerShape::Windows(shape) => {
            let [a, b] = [a, b].map(|operand| operand.access.dtype);
            let zero_points = zero_points.each_ref().map(|operand| Some(operand.as_ref()?.access.len));
            let desc = ConvDesc { shape: shape.clone(), a, b, zero_points, products, epilogue };
            ConvKernel::new(&desc, compiler).map(Kernel::Conv)
        }
    }
}

/// Returns the buffers of a product of bytes, in the order of its kernel.
fn integer_product_buffers(product: &IntegerProduct) -> impl Iterator<Item = BufferId> {
    let IntegerProduct { a, b, zero_points, epilogue, .. } = product;
    let operands = [a, b].into_iter().chain(epilogue.operands()).chain(zero_points.iter().flatten());
    operands.map(|operand| operand.buffer)
}

/// Returns the nest with accesses as operands. A kernel receives the buffer addresses when it runs.
fn nest_of_accesses(nest: &Nest) -> ortrain_expr::Nest {
    nest.map_operands(|operand| operand.access.clone())
}

/// Returns the description of an attention for its kernel.
fn attention_desc(a: &Attention) -> AttentionDesc {
    let pass = match &a.pass {
        AttentionPass::Output(output) => {
            ortrain_kernels::AttentionPass::Output(Box::new(nest_of_accesses(output)))
        }
        AttentionPass::Gradients(g) => {
            let [q, k, v] = [&g.q, &g.k, &g.v].map(|result| result.as_ref().map(nest_of_accesses));
            ortrain_kernels::AttentionPass::Gradients(Box::new(ortrain_kernels::AttentionGradients {
                output_gradient: g.output_gradient.access.clone(),
                weights: nest_of_accesses(&g.weights),
                softmax: nest_of_accesses(&g.softmax),
                scores: nest_of_accesses(&g.scores),
                q,
                k,
                v,
            }))
        }
    };
    AttentionDesc {
        size: a.size,
        width: a.width,
        q: a.q.access.clone(),
        k: a.k.access.clone(),
        v: a.v.access.clone(),
        scores: nest_of_accesses(&a.scores),
        weights: nest_of_accesses(&a.weights),
        pass,
    }
}

/// Program compiled for the CPU.
#[derive(Debug)]
pub(crate) struct CpuExecutable {
    program: Arc<Program>,
    kernels: Vec<Kernel>,
    /// Indices of the planes that the program writes.
    written_planes: Vec<usize>,
    marks: InterruptPoints,
    scratch_bytes: usize,
}

impl CpuExecutable {
    pub(crate) fn new(
        program: Arc<Program>,
        settings: &Settings,
    ) -> Result<CpuExecutable, UnsupportedOnBackend> {
        let &Settings { isa, mode, ref kernels, bf16_unit } = settings;
        let kernels = with_shared_code(isa, mode, kernels, |compiler| {
            let compile = |k: usize| {
                let scheduled = &program.instructions[k];
                let unsupported = |reason| UnsupportedOnBackend {
                    backend: "cpu",
                    node: scheduled.node.to_string(),
                    instruction: scheduled.instruction.name(),
                    reason,
                };
                Kernel::new(&program, &scheduled.instruction, compiler, bf16_unit).map_err(unsupported)
            };
            let kernels = Pool::global().map(program.instructions.len(), compile);
            kernels.into_iter().collect::<Result<Vec<_>, _>>()
        })?;
        // With less scratch memory a kernel uses fewer threads, with the same result.
        let threads = Pool::global().num_threads();
        let scratch = kernels.iter().map(|kernel| kernel.scratch_bytes(threads)).max().unwrap_or(0);
        let plane = |id: BufferId| match program.buffer(id).location {
            BufferLocation::Plane(plane, _) => Some(plane.0 as usize),
            BufferLocation::Work(_) | BufferLocation::Constant(_) => None,
        };
        let mut written: Vec<usize> =
            program.instructions.iter().flat_map(|i| i.instruction.writes()).filter_map(plane).collect();
        written.sort_unstable();
        written.dedup();
        let marks = InterruptPoints::from_program(&program);
        Ok(CpuExecutable { program, kernels, written_planes: written, marks, scratch_bytes: scratch })
    }

    /// Runs the instructions of a gradient mode in a range of positions. The workspace must be large enough.
    fn run_instructions(
        &self,
        bindings: &Bindings<'_>,
        work: &Workspace,
        (entry, positions): (GradientMode, Range<usize>),
        scalars: Scalars,
        mut observer: Option<&mut dyn Observer>,
        watch: &mut Watch,
    ) -> Result<(), RunError> {
        let addresses = Addresses::new(&self.program, bindings, work);
        let scratch = Scratch::new(host_memory(work.scratch()).as_ptr(), work.scratch().len());
        let scalars = RunScalars { seed: scalars.seed, train_step: scalars.train_step };
        for index in positions {
            let (scheduled, kernel) = (&self.program.instructions[index], &self.kernels[index]);
            if !scheduled.gradient_modes.contains(entry) {
                continue;
            }
            self.marks.check_before(index, bindings, watch)?;
            let start = observer.is_some().then(Instant::now);
            interruptible(self.marks.question(index, watch), || {
                self.run_instruction(kernel, &scheduled.instruction, &addresses, scalars, scratch)
                    .map_err(|failure| RunError::out_of_range(scheduled, failure))
            })?;
            if let (Some(observer), Some(start)) = (&mut observer, start) {
                observer.instruction(&self.program, index, start, Instant::now());
            }
        }
        Ok(())
    }

    /// Runs one instruction.
    fn run_instruction(
        &self,
        kernel: &Kernel,
        instruction: &Instruction,
        addresses: &Addresses<'_>,
        scalars: RunScalars,
        scratch: Scratch,
    ) -> Result<(), OutOfRange> {
        let pool = Pool::global();
        // SAFETY (of all calls below): addresses are starts of whole buffers inside memories that outlive the run
        // (`Executable::run` has checked their sizes). The builder has rejected instructions that access elements
        // outside their buffers. The planner lets a stored buffer share bytes with a loaded one only through equal
        // accesses. The workspace is borrowed exclusively, so arena and scratch memory belong to this run alone. Planes
        // are accessed through raw pointers only; if a user writes to a plane during the run, the order of its values
        // is unspecified, with no other consequence.
        match (kernel, instruction) {
            (Kernel::Nest(kernel), Instruction::Nest(nest)) => {
                let bases = addresses.addresses_of(nest.operands().map(|operand| operand.buffer));
                // SAFETY: see the comment at the start of the function.
                unsafe { kernel.run(&bases, scalars, pool, scratch) }
            }
            (Kernel::NestGroup(kernels), Instruction::NestGroup(group)) => {
                kernels.kernel_of_each_nest().zip(&group.nests).try_for_each(|(kernel, nest)| {
                    let bases = addresses.addresses_of(nest.operands().map(|operand| operand.buffer));
                    // SAFETY: see the comment at the start of the function.
                    unsafe { kernel.run(&bases, scalars, pool, scratch) }
                })
            }
            (Kernel::MatMul(kernel), Instruction::MatMul(m)) => {
                let operands = [&m.a, &m.b].into_iter().chain(m.epilogue.operands());
                let bases = addresses.addresses_of(operands.map(|operand| operand.buffer));
                // SAFETY: see the comment at the start of the function.
                unsafe { kernel.run(&bases, scalars, pool, scratch) }
            }
            (Kernel::MatMul(kernel), Instruction::QuantizedMatMul(m)) => {
                let epilogue = m.epilogue.operands().map(|operand| operand.buffer);
                let factors = [m.a.buffer, m.b.bytes].into_iter();
                let bases = addresses.addresses_of(factors.chain(epilogue).chain(m.b.buffers().skip(1)));
                // SAFETY: see the comment at the start of the function.
                unsafe { kernel.run(&bases, scalars, pool, scratch) }
            }
            (Kernel::Conv(kernel), Instruction::Conv(c)) => {
                let operands = [&c.a, &c.b].into_iter().chain(c.epilogue.operands());
                let mut bases = addresses.addresses_of(operands.map(|operand| operand.buffer));
                let Access { dtype, offset, .. } = c.a.access;
                bases[0] = bases[0].wrapping_add(offset * dtype.size());
                // SAFETY: see the comment at the start of the function.
                unsafe { kernel.run(&bases, scalars, pool, scratch) }
            }
            (Kernel::MatMul(kernel), Instruction::IntegerProduct(p)) => {
                let bases = addresses.addresses_of(integer_product_buffers(p));
                // SAFETY: see the comment at the start of the function.
                unsafe { kernel.run(&bases, scalars, pool, scratch) }
            }
            (Kernel::Conv(kernel), Instruction::IntegerProduct(p)) => {
                let bases = addresses.addresses_of(integer_product_buffers(p));
                // SAFETY: see the comment at the start of the function.
                unsafe { kernel.run(&bases, scalars, pool, scratch) }
            }
            (Kernel::Attention(kernel, buffers), Instruction::Attention(_)) => {
                let bases = addresses.addresses_of(buffers.iter().copied());
                // SAFETY: see the comment at the start of the function.
                unsafe { kernel.run(&bases, scalars, pool, scratch) };
                Ok(())
            }
            (Kernel::Window(kernel), Instruction::Window(w)) => {
                let [source, target] =
                    [&w.source, &w.target].map(|operand| addresses.address_of(operand.buffer));
                let index = w.index.as_ref();
                let index =
                    index.map_or(std::ptr::null_mut(), |index| addresses.address_of(index.operand.buffer));
                // SAFETY: see the comment at the start of the function.
                unsafe { kernel.run(source, index, target, pool, scratch) };
                Ok(())
            }
            (Kernel::Scatter(kernel), Instruction::ScatterAdd(s)) => {
                let [out, indices, src] =
                    [&s.target, &s.index, &s.source].map(|operand| addresses.address_of(operand.buffer));
                // SAFETY: see the comment at the start of the function.
                unsafe { kernel.run(out, indices, src, pool) };
                Ok(())
            }
            _ => unreachable!("every instruction was compiled to its own kernel"),
        }
    }
}

impl Executable for CpuExecutable {
    fn program(&self) -> &Program {
        &self.program
    }

    fn scratch_bytes(&self) -> usize {
        self.scratch_bytes
    }

    fn kernels(&self) -> Vec<String> {
        self.kernels.iter().map(Kernel::describe).collect()
    }

    fn run_observed(
        &self,
        bindings: &Bindings<'_>,
        work: &mut Workspace,
        entry: GradientMode,
        part: RunPart,
        scalars: Scalars,
        observer: Option<&mut dyn Observer>,
    ) -> Result<(), RunError> {
        let positions = self.program.part_positions(part)?;
        self.program.check_bindings(bindings, part)?;
        let needs_memory = work.needs_allocation(self.program.work_bytes, self.scratch_bytes);
        let question = work.interrupter().filter(|_| needs_memory).map(Interrupt::question);
        // The system may take seconds to provide many gigabytes.
        interruptible(question, || {
            work.reserve(self.program.work_bytes, self.scratch_bytes)?;
            if part != RunPart::BeforeYield {
                self.written_planes.iter().for_each(|&plane| prefault(host_memory(bindings.planes[plane])));
            }
            Ok::<(), RunError>(())
        })?;
        let mut watch = work.take_watch();
        let outcome =
            self.run_instructions(bindings, work, (entry, positions), scalars, observer, &mut watch);
        work.restore_watch(watch);
        outcome
    }
}
