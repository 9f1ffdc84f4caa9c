//! Keeps slopes in place of what they are made of.
//!
//! On its way back a gradient is multiplied by something made of values of the way there: that of an activation by the
//! activation's slope, say. Where several of these values would be kept for that alone, the slope is made as soon as they
//! are there, by whatever makes them, and it alone is kept. It is computed once either way.
//!
//! `g * a + g * b` becomes `g * (a + b)`: one rounding where there were several.

use ortrain_expr::{BinaryOp, Builder, DType, Expr, Inst, Reg, Scalar, Type, UnaryOp};

use super::Changed;
use crate::draft::Draft;
use crate::editor::{Editor, PLACES};
use crate::error::ProgramError;
use crate::memory::align;
use crate::operand::read_by;
use crate::rewrite::splice::{is_injective, with_expression};
use crate::scheduled::NewVersions;
use crate::target::Target;
use crate::{Buffer, BufferId, Entries, Instruction, Nest, Operand, Place, ScheduledInstruction};

/// What is kept must be less than this part of what it takes the place of.
const LESS: (usize, usize) = (3, 4);

/// The buffer of a slope before it has a number.
const NEW: BufferId = BufferId(u32::MAX);

/// A map in two: the slope, and its product with what arrives.
struct Slope {
    /// The place of the map, and that of what makes the last value that the slope needs.
    at: usize,
    after: usize,
    slope: Nest,
    product: Nest,
}

/// What a register is to another one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Share {
    /// It does not depend on what comes late.
    Independent,
    /// It is the other one multiplied by something.
    Linear,
    Other,
}

pub(super) fn run(draft: &mut Draft, _: &Target) -> Result<Changed, ProgramError> {
    let work = Editor::new(draft);
    let slopes = work.slopes();
    let mut slots = work.slots;
    let changes = slopes.len();
    apart(slopes, &mut slots, &mut draft.buffers);
    draft.instructions = slots.into_iter().flatten().collect();
    Ok(Changed(changes))
}

impl Editor<'_> {
    /// The maps that are better made in two.
    fn slopes(&self) -> Vec<Slope> {
        let mut found: Vec<Slope> = Vec::new();
        for at in 0..self.slots.len() {
            let Some(slope) = self.slope(at) else { continue };
            if found.iter().all(|other| other.after != slope.after) {
                found.push(slope);
            }
        }
        found
    }

    fn slope(&self, at: usize) -> Option<Slope> {
        let entries = |at: usize| self.slots[at].as_ref().map(|scheduled| scheduled.entries);
        let map = self.map(at).filter(|_| entries(at) == Some(Entries::ALL))?;
        let [result] = map.stores.as_slice() else { return None };
        let store = &result.access;
        let points: usize = map.dims.iter().product();
        let expr = &map.expr;
        let plain = |(inst, _): &(Inst, Type)| !matches!(inst, Inst::LoadAt(..) | Inst::Guard(..));
        if !matches!(store.dtype, DType::F32 | DType::F64)
            || expr.ty(expr.outputs()[0]) != Type::of(store.dtype)
            || store.len != points
            || !is_injective(store, &map.dims)
            || !expr.insts().iter().all(plain)
        {
            return None;
        }
        // Where each load is there from: before the first place, or after an instruction.
        let made = |id: BufferId| -> Option<Option<usize>> {
            let writers = self.writers(id);
            match writers.len() {
                0 => Some(None),
                1 if self.is_work(id) && !self.is_input(id) => Some(writers.first()),
                _ => None,
            }
        };
        let made: Vec<Option<usize>> = read_by(map).map(made).collect::<Option<_>>()?;
        let latest = made.iter().copied().max().flatten().filter(|&latest| latest < at)?;
        let late: Vec<bool> = made.iter().map(|&made| made == Some(latest)).collect();
        let arriving = arriving(expr, &late)?;

        let to_slope = Operand { buffer: NEW, access: store.clone() };
        let slope = with_expression(map, slope_of(expr, &late, arriving), to_slope, None)?;
        let product = product_with(expr, arriving, map.loads.len());
        let product = with_expression(map, product, result.clone(), Some(NEW))?;
        let needed = |id: BufferId| read_by(map).position(|read| read == id).and_then(|slot| made[slot]);
        let after = read_by(&slope).filter_map(needed).max().filter(|&after| after < latest)?;
        let room = after.is_multiple_of(PLACES) && self.slots[after + 1].is_none();
        if !room || entries(after) != Some(Entries::ALL) {
            return None;
        }
        // What would be kept for this map alone, most of the time.
        let soon = after + (latest - after) / 2;
        let mut freed: Vec<BufferId> = read_by(&slope).collect();
        freed.sort_unstable();
        freed.dedup();
        freed.retain(|id| {
            let mut others = self.readers(*id).iter().filter(|&reader| reader != at);
            self.is_work(*id)
                && !self.is_output(*id)
                && !read_by(&product).any(|read| read == *id)
                && others.all(|reader| reader <= soon)
        });
        let bytes = |id: &BufferId| align(self.buffers[id.0 as usize].bytes());
        let freed = freed.iter().map(bytes).fold(0, usize::saturating_add);
        let kept = align(points.saturating_mul(store.dtype.size()));
        (kept.saturating_mul(LESS.1) <= freed.saturating_mul(LESS.0)).then_some(Slope {
            at,
            after,
            slope,
            product,
        })
    }
}

/// Makes maps in two; slopes get buffers of their own.
fn apart(found: Vec<Slope>, slots: &mut [Option<ScheduledInstruction>], buffers: &mut Vec<Buffer>) {
    let mut new_versions = NewVersions::after(slots.iter().flatten());
    for Slope { at, after, mut slope, mut product } in found {
        let Some(scheduled) = &slots[at] else { continue };
        let result = &buffers[product.stores[0].buffer.0 as usize];
        let buffer = Buffer {
            label: format!("{}/slope", result.label).into(),
            dtype: result.dtype,
            len: slope.stores[0].access.len,
            place: Place::Work(0),
        };
        let id = BufferId(buffers.len() as u32);
        buffers.push(buffer);
        slope.stores[0].buffer = id;
        product.loaded_mut().filter(|from| from.buffer == NEW).for_each(|from| from.buffer = id);
        let (given, version) = (scheduled.versions.clone(), new_versions.next());
        let [slope, product] = [slope, product].map(Instruction::Nest);
        let of_slope = given.clone().with_write(id, version).of_instruction(&slope);
        let of_product = given.with_read(id, version).of_instruction(&product);
        let (entries, node) = (scheduled.entries, scheduled.node.clone());
        slots[after + 1] = Some(ScheduledInstruction {
            instruction: slope,
            entries,
            node: node.clone(),
            versions: of_slope,
        });
        slots[at] = Some(ScheduledInstruction { instruction: product, entries, node, versions: of_product });
    }
}

/// For each register whether it depends on some of the loads.
fn depends(expr: &Expr, loads: &[bool]) -> Vec<bool> {
    let mut found: Vec<bool> = Vec::with_capacity(expr.insts().len());
    for (inst, _) in expr.insts() {
        let own = matches!(*inst, Inst::Load(slot) if loads[usize::from(slot)]);
        found.push(own || inst.operands().any(|reg| found[usize::from(reg.0)]));
    }
    found
}

/// The last register, made of what comes late alone, that the result is a multiple of; the factor depends on nothing that
/// comes late, but on other loads.
fn arriving(expr: &Expr, late: &[bool]) -> Option<Reg> {
    let early: Vec<bool> = late.iter().map(|late| !late).collect();
    let (from_late, from_early) = (depends(expr, late), depends(expr, &early));
    let candidates = (0..expr.insts().len()).rev().filter(|&k| from_late[k] && !from_early[k]);
    let mut found = candidates.map(|k| Reg(k as u16)).filter(|&reg| is_multiple(expr, &from_late, reg));
    found.next().filter(|_| from_early[usize::from(expr.outputs()[0].0)])
}

/// Whether the result is a register multiplied by something that does not depend on what comes late.
fn is_multiple(expr: &Expr, from_late: &[bool], of: Reg) -> bool {
    use Share::{Independent, Linear, Other};
    let mut shares: Vec<Share> = Vec::with_capacity(from_late.len());
    for (k, (inst, _)) in expr.insts().iter().enumerate() {
        let share = |reg: Reg| shares[usize::from(reg.0)];
        shares.push(match *inst {
            _ if k == usize::from(of.0) => Linear,
            _ if !from_late[k] => Independent,
            Inst::Unary(UnaryOp::Neg, a) => share(a),
            Inst::Binary(op, a, b) => match (op, share(a), share(b)) {
                (BinaryOp::Add | BinaryOp::Sub, Linear, Linear)
                | (BinaryOp::Mul | BinaryOp::Div, Linear, Independent)
                | (BinaryOp::Mul, Independent, Linear) => Linear,
                _ => Other,
            },
            _ => Other,
        });
    }
    shares[usize::from(expr.outputs()[0].0)] == Linear
}

/// The result where `arriving` is 1.
fn slope_of(expr: &Expr, late: &[bool], arriving: Reg) -> Expr {
    let from_late = depends(expr, late);
    let mut b = Builder::new();
    let mut regs: Vec<Reg> = Vec::with_capacity(from_late.len());
    for (k, &(inst, ty)) in expr.insts().iter().enumerate() {
        let made_of_late = matches!(inst, Inst::Load(slot) if late[usize::from(slot)])
            || (k < usize::from(arriving.0) && from_late[k]);
        let reg = match inst.map_operands(|reg| regs[usize::from(reg.0)]) {
            // What it is made of is not needed.
            _ if k == usize::from(arriving.0) || made_of_late => {
                b.push(Inst::Const(Scalar::from_f64(ty, 1.0)), ty)
            }
            Inst::Unary(op, x) => b.unary(op, x),
            Inst::Binary(op, x, y) => b.binary(op, x, y),
            Inst::Compare(op, x, y) => b.compare(op, x, y),
            Inst::Select(condition, yes, no) => b.select(condition, yes, no),
            Inst::Convert(x) => b.convert(x, ty),
            other => b.push(other, ty),
        };
        regs.push(reg);
    }
    b.finish(&[regs[usize::from(expr.outputs()[0].0)]])
}

/// `arriving`, multiplied by what load `slot` gives.
fn product_with(expr: &Expr, arriving: Reg, slot: usize) -> Expr {
    let mut b = Builder::new();
    for &(inst, ty) in &expr.insts()[..=usize::from(arriving.0)] {
        b.push(inst, ty);
    }
    let slope = b.load(slot, expr.ty(arriving));
    let product = b.mul(arriving, slope);
    b.finish(&[product])
}
