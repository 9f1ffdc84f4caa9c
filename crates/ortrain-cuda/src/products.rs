//! Matrix products that a library computes, and the rest of their instructions.
//!
//! A product of the library is `D = alpha * A * B + beta * D + bias`. If an epilogue is more than that, the library
//! computes the plain product in the place of a result, and the epilogue becomes a map over it.

use ortrain_codegen::{Binding, MemoryId};
use ortrain_expr::{BinaryOp, DType, Inst, Precision, Reg, Type};
use ortrain_program::{BufferLocation, Instruction, Load, MatMul, Nest, Operand, Program};

/// Matrix in column-major order, as the library stores matrices.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Matrix {
    pub(crate) memory: Binding,
    /// Sizes as stored.
    pub(crate) rows: usize,
    pub(crate) columns: usize,
    /// Distance of adjacent columns.
    pub(crate) leading: usize,
    /// Distance of the matrices of a batch.
    pub(crate) batch_stride: usize,
    /// True if the product reads the transposed matrix.
    pub(crate) is_transposed: bool,
}

/// Product of the library.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Product {
    /// Position of the instruction.
    pub(crate) position: usize,
    /// Type of all elements: `F32` or `F64`.
    pub(crate) dtype: DType,
    pub(crate) batch: usize,
    pub(crate) a: Matrix,
    pub(crate) b: Matrix,
    pub(crate) d: Matrix,
    pub(crate) alpha: f64,
    pub(crate) beta: f64,
    /// Vector that is added to each column of `D`.
    pub(crate) bias: Option<Binding>,
    /// True if nothing of the instruction is left to print.
    pub(crate) is_complete: bool,
}

impl Product {
    /// Returns the number of multiplications.
    pub(crate) fn multiplications(&self) -> u64 {
        let inner = if self.a.is_transposed { self.a.rows } else { self.a.columns };
        self.batch as u64 * self.d.rows as u64 * self.d.columns as u64 * inner as u64
    }

    /// Returns true if the result is in a plane.
    pub(crate) fn writes_plane(&self) -> bool {
        matches!(self.d.memory, Binding::Bytes { memory: MemoryId::Plane(_), .. })
    }

    /// Describes the product for dumps and profiles.
    pub(crate) fn describe(&self) -> String {
        let inner = if self.a.is_transposed { self.a.rows } else { self.a.columns };
        let batch = if self.batch > 1 { format!("{} of ", self.batch) } else { String::new() };
        let rest = if self.is_complete { "" } else { ", then a map" };
        format!("cuBLASLt: {batch}{}x{}x{inner}{rest}", self.d.columns, self.d.rows)
    }
}

/// Takes the products for which `plan` has a plan out of a program. In their place, the program keeps the rest of each
/// epilogue. The guards of the instructions at `checked` are already checked.
pub(crate) fn take_products<P>(
    program: &mut Program,
    checked: &[usize],
    plan: &dyn Fn(&Product) -> Option<P>,
) -> Vec<(Product, P)> {
    let has_guards = (program.instructions.iter().enumerate())
        .any(|(at, scheduled)| scheduled.instruction.can_fail() && !checked.contains(&at));
    let mut taken = Vec::new();
    for position in 0..program.instructions.len() {
        let Instruction::MatMul(m) = &program.instructions[position].instruction else { continue };
        let found = complete(program, m, position).or_else(|| with_map(program, m, position));
        let Some((product, rest)) = found else { continue };
        // The library does not look at the fault.
        if has_guards && product.writes_plane() {
            continue;
        }
        let Some(plan) = plan(&product) else { continue };
        if let Some(rest) = rest {
            program.instructions[position].instruction = Instruction::from(rest);
        }
        taken.push((product, plan));
    }
    taken
}

/// Returns the memory of an operand, from its first element on.
fn memory_of(program: &Program, operand: &Operand) -> Binding {
    let buffer = program.buffer(operand.buffer);
    let size = buffer.dtype.size();
    let (memory, start) = match buffer.location {
        BufferLocation::Work(at) => (MemoryId::Work, at),
        BufferLocation::Plane(plane, at) => (MemoryId::Plane(plane), at),
        BufferLocation::Constant(number) => (MemoryId::Constant(number), 0),
    };
    let skipped = operand.access.offset * size;
    Binding::Bytes { memory, start: start + skipped, len: buffer.bytes().saturating_sub(skipped) }
}

/// Returns the number of matrices of a batch and their distance, if one distance is enough.
fn batch_of(dims: &[usize], strides: &[isize]) -> Option<(usize, usize)> {
    let mut count = 1;
    let mut distance: Option<isize> = None;
    for (&dim, &stride) in dims.iter().zip(strides).rev().filter(|(dim, _)| **dim > 1) {
        match distance {
            None => distance = Some(stride),
            Some(first) if stride == first * count as isize => {}
            Some(_) => return None,
        }
        count *= dim;
    }
    Some((count, usize::try_from(distance.unwrap_or(0)).ok()?))
}

/// Returns the stored form of a matrix. The arguments are the distances of its elements along rows and columns.
fn stored(rows: usize, columns: usize, [down, right]: [isize; 2]) -> Option<(usize, usize, usize, bool)> {
    let leading = |size: usize, across: usize, stride: isize| {
        let leading = if across == 1 { size } else { usize::try_from(stride).ok()? };
        (leading >= size).then_some(leading)
    };
    if (down == 1 || rows == 1)
        && let Some(leading) = leading(rows, columns, right)
    {
        return Some((rows, columns, leading, false));
    }
    if (right == 1 || columns == 1)
        && let Some(leading) = leading(columns, rows, down)
    {
        return Some((columns, rows, leading, true));
    }
    None
}

/// Returns the matrix of an operand over batch axes and two more axes; the matrix has the elements of the last axis in
/// its columns.
fn matrix(
    program: &Program,
    operand: &Operand,
    batch: &[usize],
    [outer, inner]: [usize; 2],
) -> Option<(Matrix, usize)> {
    let strides = &operand.access.strides;
    let (batch_strides, last) = strides.split_at_checked(batch.len())?;
    let (count, batch_stride) = batch_of(batch, batch_strides)?;
    let &[outer_stride, inner_stride] = last else { return None };
    let (rows, columns, leading, is_transposed) = stored(inner, outer, [inner_stride, outer_stride])?;
    let memory = memory_of(program, operand);
    Some((Matrix { memory, rows, columns, leading, batch_stride, is_transposed }, count))
}

/// Returns the product of an instruction into a result, without its epilogue.
fn product_into(program: &Program, m: &MatMul, position: usize, to: &Operand) -> Option<Product> {
    let dtype = m.a.access.dtype;
    let is_supported = matches!(dtype, DType::F32 | DType::F64)
        && m.b.access.dtype == dtype
        && to.access.dtype == dtype
        && m.rounded == [None; 2]
        && m.precision == Precision::F32
        && m.epilogue.segments.is_none()
        && m.epilogue.inner == 0;
    let is_empty = m.batch.iter().chain([&m.m, &m.n, &m.k]).any(|&size| size == 0);
    if !is_supported || is_empty {
        return None;
    }
    // Row-major matrices are transposed column-major ones: the library computes the transposed product.
    let (a, count) = matrix(program, &m.b, &m.batch, [m.k, m.n])?;
    let (b, _) = matrix(program, &m.a, &m.batch, [m.m, m.k])?;
    let (d, _) = matrix(program, to, &m.batch, [m.m, m.n])?;
    let overlaps = [&m.a, &m.b].iter().any(|factor| program.buffers_overlap(factor.buffer, to.buffer));
    let is_written_once = !d.is_transposed && (count == 1 || d.batch_stride >= d.leading * d.columns);
    (is_written_once && !overlaps).then_some(Product {
        position,
        dtype,
        batch: count,
        a,
        b,
        d,
        alpha: 1.0,
        beta: 0.0,
        bias: None,
        is_complete: false,
    })
}

/// Epilogue as a sum: a multiple of the product, a multiple of the old value, and a vector.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Sum {
    alpha: f64,
    beta: f64,
    bias: Option<u16>,
}

/// Returns an expression of an epilogue as a sum, if it is one.
fn sum_of(nest: &Nest, to: &Operand, reg: Reg) -> Option<Sum> {
    let (inst, ty) = nest.expr.insts()[usize::from(reg.0)];
    if !matches!(ty, Type::F32 | Type::F64) {
        return None;
    }
    match inst {
        Inst::Load(slot) => match &nest.loads[usize::from(slot)] {
            Load::Accumulator(_) => Some(Sum { alpha: 1.0, ..Sum::default() }),
            Load::Buffer(from) if from == to => Some(Sum { beta: 1.0, ..Sum::default() }),
            Load::Buffer(from) => {
                let (last, others) = from.access.strides.split_last()?;
                let is_vector = *last == 1 && others.iter().all(|&stride| stride == 0);
                (is_vector && from.access.dtype == to.access.dtype)
                    .then_some(Sum { bias: Some(slot), ..Sum::default() })
            }
        },
        Inst::Binary(BinaryOp::Add, x, y) => {
            let [x, y] = [sum_of(nest, to, x)?, sum_of(nest, to, y)?];
            let bias = match (x.bias, y.bias) {
                (Some(_), Some(_)) => return None,
                (first, second) => first.or(second),
            };
            // Each part occurs once, so that nothing is rounded in another way.
            let is_disjoint = x.alpha * y.alpha == 0.0 && x.beta * y.beta == 0.0;
            is_disjoint.then_some(Sum { alpha: x.alpha + y.alpha, beta: x.beta + y.beta, bias })
        }
        Inst::Binary(BinaryOp::Mul, x, y) => {
            let constant = |reg: Reg| match nest.expr.insts()[usize::from(reg.0)].0 {
                Inst::Const(value) => Some(value.to_f64()),
                _ => None,
            };
            let (sum, factor) = match (constant(x), constant(y)) {
                (None, Some(factor)) => (sum_of(nest, to, x)?, factor),
                (Some(factor), None) => (sum_of(nest, to, y)?, factor),
                _ => return None,
            };
            let is_scaled = sum.bias.is_none() && factor.is_finite();
            is_scaled.then_some(Sum { alpha: sum.alpha * factor, beta: sum.beta * factor, bias: None })
        }
        _ => None,
    }
}

/// Returns the product of an instruction, if the library computes all of its epilogue.
fn complete(program: &Program, m: &MatMul, position: usize) -> Option<(Product, Option<Nest>)> {
    let nest = &m.epilogue;
    let ([to], &[result]) = (nest.stores.as_slice(), nest.expr.outputs()) else { return None };
    if nest.expr.guards().next().is_some() {
        return None;
    }
    let sum = sum_of(nest, to, result)?;
    let product = product_into(program, m, position, to)?;
    // The library adds vectors to float32 products only.
    if sum.alpha == 0.0 || (sum.bias.is_some() && product.dtype != DType::F32) {
        return None;
    }
    let bias = match sum.bias {
        Some(slot) => {
            let from = nest.loads[usize::from(slot)].operand()?;
            let is_other = !program.buffers_overlap(from.buffer, to.buffer);
            Some(is_other.then(|| memory_of(program, from))?)
        }
        None => None,
    };
    Some((Product { alpha: sum.alpha, beta: sum.beta, bias, is_complete: true, ..product }, None))
}

/// Returns the product of an instruction in the place of a result, and the rest of its epilogue as a map.
fn with_map(program: &Program, m: &MatMul, position: usize) -> Option<(Product, Option<Nest>)> {
    let nest = &m.epilogue;
    let is_free = |to: &&Operand| {
        let reads = nest.loads.iter().filter_map(Load::operand);
        let mut others = nest.stores.iter().filter(|other| other.buffer != to.buffer);
        reads.into_iter().all(|from| !program.buffers_overlap(from.buffer, to.buffer))
            && others.all(|other| !program.buffers_overlap(other.buffer, to.buffer))
            && nest.stores.iter().filter(|other| other.buffer == to.buffer).count() == 1
    };
    let to = nest.stores.iter().find(is_free)?;
    let product = product_into(program, m, position, to)?;
    let loads = nest.loads.iter().map(|load| match load {
        Load::Accumulator(_) => Load::Buffer(to.clone()),
        other => other.clone(),
    });
    let rest = Nest { loads: loads.collect(), ..nest.clone() };
    Some((product, Some(rest)))
}
