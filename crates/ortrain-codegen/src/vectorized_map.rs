//! Vectorized maps: one invocation computes four adjacent points along the last axis. It loads and stores whole words,
//! or four words at once.

use ortrain_expr::{Access, DType, Inst};
use ortrain_program::{BufferId, Load, Nest, Operand};

use crate::context::Context;
use crate::expr::{AnalyzedNest, Point, position};
use crate::kernel::Kernel;
use crate::launch::Launch;
use crate::repr::Value;
use crate::thread_index::{define_coordinates, print_results};

/// Number of points of a quad.
const QUAD: usize = 4;
/// Minimum number of points that keep a device busy with one invocation per quad.
const MIN_POINTS: usize = 1 << 16;
/// Maximum number of instructions of an expression, which is printed once for each point of a quad.
const MAX_INSTRUCTIONS: usize = 64;

/// Returns the launch of a vectorized map; `None` if the map does not support quads.
pub(crate) fn launch(cx: &Context<'_>, known: &AnalyzedNest<'_>) -> Result<Option<Launch>, String> {
    let nest = known.nest;
    let Some(wide) = quad_buffers(cx, nest) else { return Ok(None) };
    let mut dims = nest.dims.to_vec();
    let last = dims.len() - 1;
    dims[last] /= QUAD;
    let mut kernel = cx.kernel();
    wide.into_iter().for_each(|id| kernel.bind_as_quads(id));
    let mut at = define_coordinates(&mut kernel, "id", &dims);
    at[last] = kernel.int(format!("{} * {QUAD}", at[last]));
    let loads =
        nest.loads.iter().map(|load| load_points(&mut kernel, load, &at)).collect::<Result<Vec<_>, _>>()?;
    let stores: Vec<usize> = (0..nest.stores.len()).collect();
    let mut values = Vec::new();
    for k in 0..QUAD {
        let mut at = at.clone();
        at[last] = kernel.int(format!("{} + {k}", at[last]));
        let loaded = loads.iter().map(|quad| quad[k].clone()).collect();
        let point = Point { at, loaded, ..Point::default() };
        values.push(print_results(&mut kernel, known, &point, &stores)?);
    }
    for (k, to) in nest.stores.iter().enumerate() {
        let quad = [0, 1, 2, 3].map(|point: usize| &values[point][k]);
        kernel.store_quad(to.buffer, &position(to, &at), quad);
    }
    cx.finish(kernel, dims.iter().map(|&dim| dim as u64).product()).map(Some)
}

/// Prints the loads of four points: adjacent elements, or one element.
fn load_points(kernel: &mut Kernel<'_>, load: &Load, at: &[String]) -> Result<[Value; 4], String> {
    let Load::Buffer(from) = load else { return Err("a vectorized map cannot load accumulators".into()) };
    let offset = position(from, at);
    Ok(match is_constant_along_last(&from.access) {
        true => {
            let value = kernel.load(from.buffer, &offset);
            let value = kernel.define(value);
            [0, 1, 2, 3].map(|_| value.clone())
        }
        false => kernel.load_quad(from.buffer, &offset).map(|value| kernel.define(value)),
    })
}

fn is_constant_along_last(access: &Access) -> bool {
    access.strides.last() == Some(&0)
}

/// Returns the buffers with accesses of four words, if the map supports quads.
fn quad_buffers(cx: &Context<'_>, nest: &Nest) -> Option<Vec<BufferId>> {
    let is_narrow = |operand: &Operand| operand.access.dtype.size() < 4;
    let points: usize = nest.dims.iter().product();
    let is_long = points >= MIN_POINTS || nest.stores.iter().any(is_narrow);
    let gathers = nest.expr.insts().iter().any(|(inst, _)| matches!(inst, Inst::LoadAt(..)));
    let is_map = nest.is_map() && nest.segments.is_none() && nest.num_accumulators() == 0;
    if !is_map || !is_long || gathers || nest.expr.insts().len() > MAX_INSTRUCTIONS {
        return None;
    }
    if !nest.dims.last().is_some_and(|last| last.is_multiple_of(QUAD)) {
        return None;
    }
    let by_quads = |operand: &&Operand| !is_constant_along_last(&operand.access);
    if nest.stores.iter().any(|to| !by_quads(&to)) || nest.stores.is_empty() {
        return None;
    }
    let quads: Vec<&Operand> = nest.operands().filter(by_quads).collect();
    if !quads.iter().all(|operand| reaches_aligned_quads(cx, operand)) {
        return None;
    }
    let wide: Vec<BufferId> =
        quads.iter().filter(|operand| !is_narrow(operand)).map(|operand| operand.buffer).collect();
    // Buffers with accesses of single words, or of parts of words, must be bound as words.
    let is_wide = |operand: &Operand| wide.iter().any(|&id| cx.may_share_bytes(id, operand.buffer));
    let others =
        nest.operands().filter(|operand| is_constant_along_last(&operand.access) || is_narrow(operand));
    others.into_iter().all(|operand| !is_wide(operand)).then_some(wide)
}

/// Returns true if an access always reaches four adjacent, aligned elements.
fn reaches_aligned_quads(cx: &Context<'_>, operand: &Operand) -> bool {
    let Access { dtype, offset, strides, .. } = &operand.access;
    let Some((&last, others)) = strides.split_last() else { return false };
    let aligned = |stride: &isize| stride.unsigned_abs().is_multiple_of(QUAD);
    let first = cx.first_element(operand.buffer) + *offset as isize;
    let fits = dtype.size() <= 4 && !matches!(dtype, DType::F64);
    fits && last == 1 && others.iter().all(aligned) && first.unsigned_abs().is_multiple_of(QUAD)
}
