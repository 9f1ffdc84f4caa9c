//! Fusion of two nests: inlining a producer into its consumer, or appending a consumer to its producer.

use ortrain_expr::{Access, Builder, DType, Expr, Inst, Reg, Scalar, Type, UnaryOp};

use super::index_map::Embedding;
use crate::buffer::{BufferIds, distinct};
use crate::operand::load_access;
use crate::{BufferId, Instruction, Load, Nest, Operand};

/// Maximum length of a fused expression. A longer expression needs more registers than fit into the first-level cache.
const MAX_EXPRESSION_LEN: usize = 192;

/// Maximum number of buffers that a fused nest reads.
const MAX_LOADS: usize = 32;

/// Maximum number of buffers that a fused nest writes. With more of them, the test of every further candidate takes
/// longer than its fusion saves.
const MAX_STORES: usize = 64;

/// Returns true if an expression can compute the value that a load reads after a store of this type ([`reload_value`]).
fn is_reloadable(dtype: DType) -> bool {
    !matches!(dtype, DType::I8 | DType::U8 | DType::I16 | DType::U16)
}

/// Computes the value that a load of type `ty` reads after a store of `value` as `stored`.
fn reload_value(b: &mut Builder, value: Reg, stored: DType, ty: Type) -> Reg {
    let value = b.convert(value, Type::of(stored));
    let value = UnaryOp::rounding_to(stored).map_or(value, |op| b.unary(op, value));
    b.convert(value, ty)
}

/// Removes roundings of results that their stores repeat. `stores` may be empty.
fn remove_store_roundings(b: &Builder, outputs: &mut [Reg], stores: &[Operand]) {
    for (reg, store) in outputs.iter_mut().zip(stores) {
        if let Inst::Unary(op, value) = b.inst(*reg)
            && UnaryOp::rounding_to(store.access.dtype) == Some(op)
        {
            *reg = value;
        }
    }
}

/// Returns true if both accesses reach the same elements over a space.
pub(crate) fn is_same_access(a: &Access, b: &Access, dims: &[usize]) -> bool {
    a.offset == b.offset
        && a.dtype == b.dtype
        && dims.iter().zip(a.strides.iter().zip(&b.strides)).all(|(&dim, (x, y))| dim == 1 || x == y)
}

/// Returns true if an access provably reaches a different element at every point.
pub(crate) fn is_injective(access: &Access, dims: &[usize]) -> bool {
    let axes = dims.iter().zip(&access.strides).filter(|&(&dim, _)| dim > 1);
    let mut axes: Vec<(usize, usize)> = axes.map(|(&dim, &stride)| (stride.unsigned_abs(), dim)).collect();
    axes.sort_unstable();
    let mut extent = 1usize;
    axes.into_iter().all(|(stride, dim)| {
        let is_separate = stride >= extent;
        extent = stride.saturating_mul(dim);
        is_separate
    })
}

/// Loads of a nest under construction.
struct Loads(Vec<Load>);

impl Loads {
    fn find_or_add(&mut self, operand: Operand, dims: &[usize]) -> usize {
        let is_known = |known: &Operand| {
            known.buffer == operand.buffer && is_same_access(&known.access, &operand.access, dims)
        };
        let known = self.0.iter().position(|load| load.operand().is_some_and(is_known));
        known.unwrap_or_else(|| self.add(operand))
    }

    /// Returns the slot of a load that is read by computed index. It is shared only with a load of an equal access.
    fn find_or_add_gathered(&mut self, operand: Operand) -> usize {
        let known = self.0.iter().position(|load| load.operand() == Some(&operand));
        known.unwrap_or_else(|| self.add(operand))
    }

    fn add(&mut self, operand: Operand) -> usize {
        self.0.push(Load::Buffer(operand));
        self.0.len() - 1
    }

    /// Returns the nest with its accumulators and the loads that its expression uses.
    fn finish(self, nest: Nest) -> Option<Nest> {
        self.finish_without(nest, |_| false)
    }

    /// As [`Loads::finish`], without the accumulators that satisfy `is_gone`. The expression must not use them.
    fn finish_without(self, mut nest: Nest, is_gone: impl Fn(usize) -> bool) -> Option<Nest> {
        let is_unused = |(slot, load): (usize, &Load)| load.is_accumulator() && !is_gone(slot);
        let mut used: Vec<bool> = self.0.iter().enumerate().map(is_unused).collect();
        for (inst, _) in nest.expr.insts() {
            if let Inst::Load(slot) | Inst::LoadAt(slot, _) = *inst {
                used[usize::from(slot)] = true;
            }
        }
        let mut slots = Vec::with_capacity(used.len());
        for (load, used) in self.0.into_iter().zip(used) {
            slots.push(nest.loads.len() as u16);
            nest.loads.extend(used.then_some(load));
        }
        nest.expr = nest.expr.with_slots(|slot| slots[usize::from(slot)]);
        if nest.expr.insts().len() > MAX_EXPRESSION_LEN || nest.loads.len() > MAX_LOADS {
            return None;
        }
        Some(nest)
    }
}

/// Returns true if a fused nest provably reads more buffers than [`MAX_LOADS`]. `others` are the buffers that the two
/// nests read, without the buffer between them.
fn exceeds_max_loads(others: impl Iterator<Item = BufferId>) -> bool {
    let ids: BufferIds = others.collect();
    ids.len() > MAX_LOADS && distinct(ids).len() > MAX_LOADS
}

/// Returns the number of loads of a map, or the number of distinct loaded buffers if the loads exceed [`MAX_LOADS`].
/// Fusion is impossible if it exceeds [`max_loads_after`].
pub(crate) fn count_loads(map: &Nest) -> usize {
    if map.loads.len() <= MAX_LOADS { map.loads.len() } else { distinct(expression_loads(map)).len() }
}

/// Returns true if [`inline`] is impossible for every load of a nest, because the nest reads too many other buffers.
pub(crate) fn has_too_many_loads(host: &Nest) -> bool {
    host.loads.len() > MAX_LOADS && distinct(expression_loads(host)).len() > MAX_LOADS + 1
}

/// Returns the maximum number of buffers that a map may load to be fused after an instruction: the limit of a nest, and
/// the instruction's results.
pub(crate) fn max_loads_after(instruction: &Instruction) -> usize {
    MAX_LOADS + instruction.flexible_nest().map_or(0, |nest| nest.stores.len())
}

/// Returns the buffers that the expression of a nest loads.
fn expression_loads(nest: &Nest) -> impl Iterator<Item = BufferId> + '_ {
    let loads = nest.expr.insts().iter().filter_map(|(inst, _)| match *inst {
        Inst::Load(slot) | Inst::LoadAt(slot, _) => Some(&nest.loads[usize::from(slot)]),
        _ => None,
    });
    loads.filter_map(|load| load.operand().map(|operand| operand.buffer))
}

/// Map that is copied into a host nest: its loads become loads of the host.
struct Guest<'a> {
    map: &'a Nest,
    embedding: &'a Embedding,
    /// Number of trailing axes of the host that the embedding does not cover.
    more_axes: usize,
}

impl Guest<'_> {
    fn access(&self, access: &Access, gathered: bool) -> Access {
        let mut new_access =
            if gathered { self.embedding.gathered(access) } else { self.embedding.access(access) };
        let axes = new_access.strides.len() + self.more_axes;
        new_access.strides.resize(axes, 0);
        new_access
    }

    /// Copies the expression and returns its registers. `known` returns the register that replaces a load, if any.
    fn copy(
        &self,
        b: &mut Builder,
        loads: &mut Loads,
        dims: &[usize],
        known: impl Fn(usize) -> Option<Reg>,
    ) -> Option<Vec<Reg>> {
        let nest = self.map;
        let (mut gathered, mut affine) = (vec![false; nest.loads.len()], vec![false; nest.loads.len()]);
        for (inst, _) in nest.expr.insts() {
            match *inst {
                Inst::Load(slot) => affine[usize::from(slot)] = true,
                Inst::LoadAt(slot, _) => gathered[usize::from(slot)] = true,
                _ => {}
            }
        }
        let mut slots: Vec<Option<usize>> = Vec::with_capacity(nest.loads.len());
        for (slot, load) in nest.loads.iter().enumerate() {
            if known(slot).is_some() {
                slots.push(None);
                continue;
            }
            if gathered[slot] && affine[slot] {
                return None;
            }
            let operand = load.operand()?;
            let new_operand = operand.with_access(self.access(&operand.access, gathered[slot]));
            // Strides along axes of size 1 matter only to a load that is read by computed index.
            slots.push(Some(if gathered[slot] {
                loads.find_or_add_gathered(new_operand)
            } else {
                loads.find_or_add(new_operand, dims)
            }));
        }
        if b.is_empty()
            && let Some(same) = self.expression_with_slots(&slots)
        {
            *b = Builder::from_expr(same);
            return Some((0..nest.expr.insts().len() as u16).map(Reg).collect());
        }
        Some(b.copy(&nest.expr, |b, inst, ty| match inst {
            Inst::Load(slot) => match (slots[usize::from(slot)], known(usize::from(slot))) {
                (None, Some(value)) => reload_value(b, value, nest.loads[usize::from(slot)].dtype(), ty),
                (moved, _) => b.load(moved.unwrap_or(0), ty),
            },
            Inst::LoadAt(slot, at) => b.load_at(slots[usize::from(slot)].unwrap_or(0), at, ty),
            Inst::Coordinate(axis) => self.embedding.coordinate(b, usize::from(axis)),
            other => b.push(other, ty),
        }))
    }

    /// Returns the expression with these slots of loads, if nothing else changes in the host.
    fn expression_with_slots(&self, slots: &[Option<usize>]) -> Option<Expr> {
        let expr = &self.map.expr;
        let is_distinct = |k: usize| slots[k].is_some() && !slots[..k].contains(&slots[k]);
        let uses_coordinate = expr.insts().iter().any(|(inst, _)| matches!(inst, Inst::Coordinate(_)));
        if uses_coordinate || !(0..slots.len()).all(is_distinct) {
            return None;
        }
        Some(expr.clone().with_slots(|slot| slots[usize::from(slot)].unwrap_or(0) as u16))
    }
}

/// Returns the part of a nest that computes the results marked in `keep`, or `None` if all are marked.
pub(crate) fn keep_results(nest: &Nest, keep: &[bool]) -> Option<Nest> {
    if keep.iter().all(|&is_retained| is_retained) {
        return None;
    }
    let keeps_store = |k: &usize| keep[*k];
    let outputs: Vec<Reg> = (0..keep.len()).filter(keeps_store).map(|k| nest.expr.outputs()[k]).collect();
    // Reductions that the results need, directly or through other reductions.
    let mut required = vec![false; nest.reductions.len()];
    let mark = |required: &mut [bool], roots: &[Reg]| {
        let needed = nest.expr.dependencies_of(roots);
        for ((inst, _), _) in nest.expr.insts().iter().zip(needed).filter(|(_, needed)| *needed) {
            if let Inst::Reduced(k) = *inst {
                required[usize::from(k)] = true;
            }
        }
    };
    mark(&mut required, &outputs);
    mark(&mut required, &nest.expr.guards().collect::<Vec<_>>());
    for k in (0..required.len()).rev() {
        if required[k] {
            mark(&mut required, &[nest.reductions[k].value]);
        }
    }
    let renumber = |k: u8| required[..usize::from(k)].iter().filter(|&&is_required| is_required).count();
    let mut b = Builder::new();
    let regs = b.copy(&nest.expr, |b, inst, ty| match inst {
        // Unneeded reductions have no reader, so their index is irrelevant.
        Inst::Reduced(k) => b.reduced(renumber(k), ty),
        other => b.push(other, ty),
    });
    let reductions: Vec<_> = nest
        .reductions
        .iter()
        .zip(&required)
        .filter(|&(_, &is_required)| is_required)
        .map(|(r, _)| r.clone())
        .collect();
    let outputs: Vec<Reg> = outputs.into_iter().map(|reg| regs[usize::from(reg.0)]).collect();
    let (expr, reductions) = b.finish_reducing(&outputs, &reductions, &regs);
    let part = Nest {
        dims: nest.dims.clone(),
        inner: nest.inner,
        segments: nest.segments.clone(),
        loads: Vec::new(),
        expr,
        reductions,
        stores: (0..keep.len()).filter(keeps_store).map(|k| nest.stores[k].clone()).collect(),
    };
    Loads(nest.loads.clone()).finish(part)
}

/// Returns a nest with constant values in place of some loads. Returns `None` if one of these is also read by computed
/// index.
pub(crate) fn with_constants(nest: &Nest, values: &[Option<Scalar>]) -> Option<Nest> {
    if (0..values.len()).any(|slot| values[slot].is_some() && nest.is_gathered(slot)) {
        return None;
    }
    let mut b = Builder::new();
    let constant = |inst, ty| match inst {
        Inst::Load(slot) => values[usize::from(slot)].map(|value| Inst::Const(value.convert(ty))),
        _ => None,
    };
    let regs = b.copy(&nest.expr, |b, inst, ty| b.fold(constant(inst, ty).unwrap_or(inst), ty));
    let (expr, reductions) = b.finish_copy(&nest.expr, &nest.reductions, &regs);
    let without_loads = Nest { loads: Vec::new(), expr, reductions, ..nest.clone() };
    Loads(nest.loads.clone()).finish_without(without_loads, |slot| values[slot].is_some())
}

/// Returns a map over the same space with another expression of one result. `more` adds a load with the access of the
/// store.
pub(crate) fn with_expression(
    map: &Nest,
    expr: Expr,
    store: Operand,
    more: Option<BufferId>,
) -> Option<Nest> {
    let mut loads = Loads(map.loads.clone());
    loads.0.extend(more.map(|buffer| Load::Buffer(Operand { buffer, access: store.access.clone() })));
    loads.finish(Nest { loads: Vec::new(), expr, reductions: Vec::new(), stores: vec![store], ..map.clone() })
}

/// Returns the host with an inlined producer: `guest` is the single-result map that computes load `slot`. Returns
/// `None` if the spaces do not match.
pub(crate) fn inline(host: &Nest, slot: usize, guest: &Nest, split: bool) -> Option<Nest> {
    let Operand { buffer: value, access: at } = host.loads[slot].operand()?;
    if host.segments.is_some() || guest.segments.is_some() {
        return None;
    }
    if exceeds_max_loads(expression_loads(host).filter(|id| id != value).chain(expression_loads(guest))) {
        return None;
    }
    let stored = &guest.stores.first()?.access;
    if host.is_gathered(slot) || !is_reloadable(at.dtype) || at.dtype != stored.dtype {
        return None;
    }
    let embedding = Embedding::new(&host.dims, at, guest, stored, split)?;
    // A guard checks every computed element, so the host must read all of them.
    let points = |nest: &Nest| nest.dims.iter().product::<usize>();
    let every_element = points(host) == points(guest) && is_injective(at, &host.dims);
    if guest.expr.can_fail() && !every_element {
        return None;
    }
    let mut nest = embedding.split_host(host);
    let mut loads = Loads(std::mem::take(&mut nest.loads));
    let mut b = Builder::new();
    let part = Guest { map: guest, embedding: &embedding, more_axes: 0 };
    let regs = part.copy(&mut b, &mut loads, &nest.dims, |_| None)?;
    let value = regs[usize::from(guest.expr.outputs()[0].0)];
    let host_regs = b.copy(&nest.expr, |b, inst, ty| match inst {
        Inst::Load(load) if usize::from(load) == slot => reload_value(b, value, stored.dtype, ty),
        other => b.push(other, ty),
    });
    let mut outputs: Vec<Reg> = nest.expr.outputs().iter().map(|reg| host_regs[usize::from(reg.0)]).collect();
    remove_store_roundings(&b, &mut outputs, &nest.stores);
    let (expr, reductions) = b.finish_reducing(&outputs, &nest.reductions, &host_regs);
    loads.finish(Nest { expr, reductions, ..nest })
}

/// Buffer that relates the space of a map to the space of a host.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Link {
    /// Result of the host (by index) that the map reads (by slot).
    Result(usize, usize),
    /// Buffer that both read: slots of the host and of the map.
    Shared(usize, usize),
}

/// Returns a host with an appended consumer: a map over the host's outer points or over all of its points. The map
/// takes results of the host from registers; it loads them through accumulators or buffers before the fusion. `keep`
/// marks the results of the host that are still stored.
pub(crate) fn append(host: &Nest, map: &Nest, link: Link, keep: &[bool], split: bool) -> Option<Nest> {
    let (at, stored) = match link {
        Link::Result(store, load) => (&host.stores[store].access, load_access(&map.loads[load], &map.dims)),
        Link::Shared(own, load) => (host.loads[own].access()?, load_access(&map.loads[load], &map.dims)),
    };
    let retained = keep.iter().filter(|&&is_retained| is_retained).count();
    if retained + map.stores.len() > MAX_STORES {
        return None;
    }
    if at.dtype != stored.dtype || host.dims.contains(&0) {
        return None;
    }
    if host.segments.is_some() || map.segments.is_some() {
        return None;
    }
    let result_of = |id: BufferId| host.stores.iter().position(|store| store.buffer == id);
    if exceeds_max_loads(expression_loads(map).filter(|&id| result_of(id).is_none())) {
        return None;
    }
    // Values that are constant along a row are computed once per row.
    let outer_rank = host.dims.len() - host.inner;
    let per_row = host.inner > 0 && at.strides[outer_rank..].iter().all(|&stride| stride == 0);
    let space = if per_row { host.outer_dims() } else { &host.dims[..] };
    let points = |dims: &[usize]| dims.iter().product::<usize>();
    if points(space) != points(&map.dims) || !is_injective(at, space) {
        return None;
    }
    let embedding = Embedding::new(space, at, map, &stored, split)?;
    let mut nest = embedding.split_host(host);
    let mut loads = Loads(std::mem::take(&mut nest.loads));
    let mut b = Builder::from_expr(nest.expr.clone());
    let results = nest.expr.outputs();
    let part = Guest { map, embedding: &embedding, more_axes: if per_row { nest.inner } else { 0 } };
    // Results of the host must be read with exactly the access of their store, or not at all.
    let mut inlined: Vec<Option<Reg>> = Vec::with_capacity(map.loads.len());
    for (slot, load) in map.loads.iter().enumerate() {
        inlined.push(match load.operand().map_or(Some(slot), |operand| result_of(operand.buffer)) {
            None => None,
            Some(result) => {
                let access = load_access(load, &map.dims);
                let exact = is_same_access(
                    &part.access(&access, false),
                    &nest.stores.get(result)?.access,
                    &nest.dims,
                );
                if !exact || !is_reloadable(access.dtype) || map.is_gathered(slot) {
                    return None;
                }
                Some(results[result])
            }
        });
    }
    let regs = part.copy(&mut b, &mut loads, &nest.dims, |slot| inlined[slot])?;
    let (mut outputs, mut stores) = (Vec::new(), Vec::new());
    for (result, _) in keep.iter().enumerate().filter(|&(_, &is_retained)| is_retained) {
        outputs.push(results[result]);
        stores.push(nest.stores[result].clone());
    }
    outputs.extend(map.expr.outputs().iter().map(|reg| regs[usize::from(reg.0)]));
    stores.extend(map.stores.iter().map(|store| store.with_access(part.access(&store.access, false))));
    remove_store_roundings(&b, &mut outputs, &stores);
    let nest_regs: Vec<Reg> = (0..nest.expr.insts().len() as u16).map(Reg).collect();
    let (expr, reductions) = b.finish_reducing(&outputs, &nest.reductions, &nest_regs);
    loads.finish(Nest { expr, reductions, stores, ..nest })
}
