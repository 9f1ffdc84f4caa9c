//! Groups of operations, and the functions that are compiled from them.

use std::fmt;
use std::mem::MaybeUninit;
use std::sync::{Arc, LazyLock, Mutex, OnceLock, PoisonError};

use memmap2::{Mmap, MmapMut};
use ortrain_expr::elementary::Machine;
use ortrain_expr::{BinaryOp, DType, ReduceOp, Type, UnaryOp};
use rustc_hash::FxHashMap;
use smallvec::SmallVec;

use super::codegen::{MAX_POINTERS, ROUND, emit};
use super::encoder::Encoder;
use super::ir::{Effect, Value, VectorInst, VectorProgram};
use super::x86_64::{Code, EntryPoint, Target};
use super::{Context, Site};
use crate::isa::{CACHE_LINE_BYTES, Isa};
use crate::tile::memory::StridedView;
use crate::tile::op::{DIRECT_BIT, DIRECT_PRODUCT, Kind, Op, RegisterKind, Slot};
use crate::tile::ops;
use crate::tile::pairwise_sum::PairwiseSum;

/// Data at a pointer of a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pointer {
    Product,
    Load(u16),
    Store(u16),
}

/// Operations that become one function, before registers of the tile program have their offsets.
#[derive(Debug)]
pub(in crate::tile) struct Group {
    code: Arc<Code>,
    pointers: SmallVec<[Pointer; 8]>,
    folds: SmallVec<[FoldResult; 2]>,
    /// Registers of the tile program.
    reads: Vec<Slot>,
    writes: Vec<Slot>,
}

/// Results of a fold: the lanes that the function stores, and the [`PairwiseSum`] that receives the joined lanes.
#[derive(Clone, Copy, Debug)]
struct FoldResult {
    op: ReduceOp,
    lanes: Slot,
    chain: Slot,
}

/// Returns true if a group supports an operation.
pub(in crate::tile) fn takes(op: &Op, context: &Context<'_>) -> bool {
    if context.isa == Isa::PORTABLE {
        return false;
    }
    // Uniform operations: only arithmetic on numbers.
    if op.is_uniform && !matches!(op.kind, Kind::Unary(..) | Kind::Binary(_, Type::F32)) {
        return false;
    }
    match op.kind {
        Kind::Unary(UnaryOp::Sin | UnaryOp::Cos | UnaryOp::Atan | UnaryOp::Not, _)
        | Kind::Binary(BinaryOp::Pow | BinaryOp::Rem, _) => false,
        Kind::Binary(BinaryOp::And | BinaryOp::Or | BinaryOp::Xor, ty) => ty == Type::Bool,
        Kind::Unary(_, ty)
        | Kind::Binary(_, ty)
        | Kind::Compare(_, ty)
        | Kind::Select(ty)
        | Kind::Copy(ty)
        | Kind::Splat(ty)
        | Kind::Fold(_, ty)
        | Kind::Accumulate(_, ty) => ty == Type::F32,
        Kind::Convert(Type::Bool | Type::I32 | Type::U32, Type::F32)
        | Kind::Convert(Type::F32, Type::Bool | Type::I32 | Type::U32)
        | Kind::Convert(Type::I32, Type::U32)
        | Kind::Convert(Type::U32, Type::I32) => true,
        Kind::Store(slot) => {
            let store = &context.stores[usize::from(slot)];
            let has_full_pieces =
                store.contiguous_len().is_some_and(|piece| piece.is_multiple_of(context.piece));
            has_full_pieces && store.dtype == DType::F32 || takes_bytes(store, context)
        }
        Kind::Load(slot) => takes_bytes(&context.loads[usize::from(slot)], context),
        _ => false,
    }
}

/// Returns true if machine code loads or stores the bytes of an access.
fn takes_bytes(access: &StridedView, context: &Context<'_>) -> bool {
    let has_full_pieces =
        access.contiguous_bytes_len().is_some_and(|piece| piece.is_multiple_of(context.piece));
    has_full_pieces && Target::resources(context.isa.kind()).has_bytes
}

impl Group {
    /// Compiles a group of operations. All operations are [supported](takes), and are in an order in which they may
    /// run. `lanes_of` adds a register to the tile program for the lanes of a fold. Returns `None` if there are too few
    /// machine registers.
    pub(in crate::tile) fn new(
        list: &[Op],
        context: &Context<'_>,
        mut lanes_of: impl FnMut() -> Slot,
    ) -> Option<Group> {
        let level = context.isa.kind();
        let mut builder = GroupBuilder {
            context,
            lanes: VectorProgram::new(level, Target::resources(level).has_scale),
            pointers: SmallVec::new(),
            folds: SmallVec::new(),
            reads: Vec::new(),
            writes: Vec::new(),
            values: FxHashMap::default(),
            reads_inside: FxHashMap::default(),
        };
        for op in list {
            builder.add_op(op, &mut lanes_of)?;
        }
        // Results that other operations read are written to registers. This comes last, because an operation may load
        // and store the same register.
        for op in list {
            let Some(&value) = builder.values.get(&op.d) else { continue };
            let readers = context.readers.get(&op.d).copied().unwrap_or(0);
            if readers > builder.reads_inside.get(&op.d).copied().unwrap_or(0) {
                builder.write(op.d, value);
            }
        }
        let GroupBuilder { lanes, pointers, folds, reads, writes, .. } = builder;
        if pointers.len() > MAX_POINTERS {
            return None;
        }
        Some(Group { code: get_or_assemble(lanes)?, pointers, folds, reads, writes })
    }

    /// Returns the registers of the tile program that the group reads.
    pub(in crate::tile) fn reads(&self) -> &[Slot] {
        &self.reads
    }

    /// Returns the registers of the tile program that the group writes.
    pub(in crate::tile) fn writes(&self) -> &[Slot] {
        &self.writes
    }
}

/// Maximum number of cached functions, of a few kilobytes each. Large networks need a few hundred.
pub(super) const MAX_CACHED_FUNCTIONS: usize = 1024;

/// Returns the cached code of `lanes`, or compiles it. Layers of a network compute the same over other sizes, and so do
/// programs for other batch sizes. Returns `None` if the code needs too many registers.
pub(super) fn get_or_assemble(lanes: VectorProgram) -> Option<Arc<Code>> {
    type Cache = FxHashMap<VectorProgram, Option<Arc<Code>>>;
    static CACHE: LazyLock<Mutex<Cache>> = LazyLock::new(Mutex::default);
    let lock = || CACHE.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(code) = lock().get(&lanes) {
        return code.clone();
    }
    let code = emit::<Target>(&lanes).map(Arc::new);
    let mut cache = lock();
    if cache.len() >= MAX_CACHED_FUNCTIONS {
        cache.clear();
    }
    cache.insert(lanes.into_key(), code.clone());
    code
}

/// A group under construction.
struct GroupBuilder<'a> {
    context: &'a Context<'a>,
    lanes: VectorProgram,
    pointers: SmallVec<[Pointer; 8]>,
    folds: SmallVec<[FoldResult; 2]>,
    reads: Vec<Slot>,
    writes: Vec<Slot>,
    /// Values of the tile program's registers that are operands or results.
    values: FxHashMap<Slot, Value>,
    /// Number of reads of each register inside of the group.
    reads_inside: FxHashMap<Slot, usize>,
}

impl GroupBuilder<'_> {
    fn operand(&mut self, slot: Slot) -> Value {
        *self.reads_inside.entry(slot).or_default() += 1;
        if let Some(&value) = self.values.get(&slot) {
            return value;
        }
        let lane = match (self.context.sizes)(slot) {
            RegisterKind::Direct(there) => {
                let pointer = if there == DIRECT_PRODUCT {
                    Pointer::Product
                } else {
                    Pointer::Load((there & !DIRECT_BIT) as u16)
                };
                VectorInst::Memory(self.pointer(pointer))
            }
            RegisterKind::DirectUniform(there) => {
                VectorInst::MemoryBroadcast(self.pointer(Pointer::Load((there & !DIRECT_BIT) as u16)))
            }
            RegisterKind::Uniform => match self.context.constants.get(&slot) {
                Some(&bits) => VectorInst::Constant(bits as u32),
                None => {
                    self.read(slot);
                    VectorInst::FrameBroadcast(slot)
                }
            },
            RegisterKind::Tile(Type::Bool) => {
                self.read(slot);
                VectorInst::Truths(slot)
            }
            RegisterKind::Tile(_) | RegisterKind::PairwiseSum | RegisterKind::Lanes => {
                self.read(slot);
                VectorInst::Tile(slot)
            }
        };
        let value = self.lanes.push(lane);
        self.values.insert(slot, value);
        value
    }

    fn read(&mut self, slot: Slot) {
        if !self.reads.contains(&slot) {
            self.reads.push(slot);
        }
    }

    fn write(&mut self, slot: Slot, value: Value) {
        if self.writes.contains(&slot) {
            return;
        }
        self.writes.push(slot);
        let effect = match (self.context.sizes)(slot) {
            RegisterKind::Tile(Type::Bool) => Effect::Truths(slot, value),
            RegisterKind::Uniform => Effect::FrameScalar(slot, value),
            _ => Effect::Tile(slot, value),
        };
        self.lanes.effects.push(effect);
    }

    fn pointer(&mut self, pointer: Pointer) -> u8 {
        let pointers = &mut self.pointers;
        let known = pointers.iter().position(|&other| other == pointer);
        let index = known.unwrap_or_else(|| {
            pointers.push(pointer);
            let reach = match pointer {
                Pointer::Product => None,
                Pointer::Load(slot) => self.context.loads.get(usize::from(slot)),
                Pointer::Store(slot) => self.context.stores.get(usize::from(slot)),
            };
            let step = reach.and_then(|reach| reach.piece_stride_bytes(self.context.piece));
            self.lanes.prefetch_steps.push(step.filter(|_| self.context.tile >= self.context.piece));
            pointers.len() - 1
        });
        // Too many pointers for a byte: `Group::new` refuses the group afterwards.
        index.min(255) as u8
    }

    fn add_op(&mut self, op: &Op, lanes_of: &mut impl FnMut() -> Slot) -> Option<()> {
        if let Kind::Load(slot) = op.kind {
            let is_signed = self.context.loads[usize::from(slot)].dtype == DType::I8;
            let pointer = self.pointer(Pointer::Load(slot));
            let bytes = self.lanes.push(VectorInst::Bytes(pointer, is_signed));
            self.values.insert(op.d, bytes);
            return Some(());
        }
        let a = self.operand(op.a[0]);
        let result = match op.kind {
            Kind::Unary(unary, _) => self.lanes.unary(unary, a)?,
            Kind::Binary(binary, ty) => {
                let b = self.operand(op.a[1]);
                let lanes = &mut self.lanes;
                if ty == Type::Bool { lanes.logic(binary, a, b)? } else { lanes.binary(binary, a, b)? }
            }
            Kind::Compare(compare, _) => {
                let b = self.operand(op.a[1]);
                self.lanes.compare(compare, a, b)
            }
            Kind::Select(_) => {
                let (b, c) = (self.operand(op.a[1]), self.operand(op.a[2]));
                self.lanes.choose(a, b, c)
            }
            Kind::Convert(Type::Bool, _) => self.lanes.truth_to_f32(a),
            Kind::Convert(_, Type::Bool) => self.lanes.is_nonzero(a),
            Kind::Convert(from, Type::F32) => self.lanes.integer_to_f32(a, from == Type::I32),
            Kind::Convert(Type::F32, to) => self.lanes.f32_to_integer(a, to == Type::I32),
            // Integers of 32 bits keep their bits.
            Kind::Copy(_) | Kind::Splat(_) | Kind::Convert(..) => a,
            Kind::Fold(reduce, _) => {
                let lane_slot = lanes_of();
                self.lanes.fold(reduce, lane_slot, a);
                self.folds.push(FoldResult { op: reduce, lanes: lane_slot, chain: op.d });
                self.writes.extend([lane_slot, op.d]);
                return Some(());
            }
            Kind::Accumulate(reduce, _) => {
                let old = self.lanes.push(VectorInst::Tile(op.d));
                self.read(op.d);
                let sum = self.lanes.reduce(reduce, old, a);
                self.write(op.d, sum);
                return Some(());
            }
            Kind::Store(slot) => {
                let pointer = self.pointer(Pointer::Store(slot));
                let is_f32 = self.context.stores[usize::from(slot)].dtype == DType::F32;
                let effect = if is_f32 { Effect::Memory(pointer, a) } else { Effect::Bytes(pointer, a) };
                self.lanes.effects.push(effect);
                return Some(());
            }
            other => unreachable!("{other:?} is not for groups"),
        };
        self.values.insert(op.d, result);
        Some(())
    }
}

/// Memory for the functions of tile programs: writable while they are compiled, executable from then on, never both.
#[derive(Default)]
pub(in crate::tile) struct CodeMemory {
    written: Mutex<Vec<u8>>,
    executable: OnceLock<Mmap>,
}

impl CodeMemory {
    /// Makes all functions executable. Returns false if the system does not allow it, or if functions were added after
    /// an earlier call. These new functions never run.
    pub(in crate::tile) fn finish(&self) -> bool {
        let code = std::mem::take(&mut *self.written.lock().unwrap_or_else(PoisonError::into_inner));
        if code.is_empty() {
            return true;
        }
        let executable = || {
            let mut memory = MmapMut::map_anon(code.len())?;
            memory.copy_from_slice(&code);
            memory.make_exec()
        };
        executable().is_ok_and(|memory| self.executable.set(memory).is_ok())
    }
}

impl fmt::Debug for CodeMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.executable.get().map_or(0, |memory| memory.len());
        f.debug_struct("CodeMemory").field("bytes", &bytes).finish_non_exhaustive()
    }
}

/// The groups of a tile program as functions.
#[derive(Debug)]
pub(in crate::tile) struct Functions {
    memory: Arc<CodeMemory>,
    list: Vec<Function>,
}

#[derive(Debug)]
struct Function {
    /// Offset of the function in the code memory.
    start: usize,
    pointers: SmallVec<[Pointer; 8]>,
    /// Folds, with offsets in the frame.
    folds: SmallVec<[FoldResult; 2]>,
}

/// 16 words of all ones, then 16 words of zeros. Any 16 consecutive words are the mask of an incomplete end.
static MASK_WORDS: [i32; 2 * ROUND] = {
    let mut words = [0; 2 * ROUND];
    let mut i = 0;
    while i < ROUND {
        words[i] = -1;
        i += 1;
    }
    words
};

impl Functions {
    /// Appends the functions to the code memory. `slot_of` returns the offset of a register in the frame. Functions may
    /// run after the memory is [finished](CodeMemory::finish).
    pub(in crate::tile) fn new(
        groups: &[Group],
        slot_of: &dyn Fn(Slot) -> Slot,
        memory: &Arc<CodeMemory>,
    ) -> Functions {
        let mut code = memory.written.lock().unwrap_or_else(PoisonError::into_inner);
        let function = |Group { code: function, pointers, folds, .. }: &Group| {
            // Functions begin at a line of the instruction cache.
            let start = code.len().next_multiple_of(CACHE_LINE_BYTES);
            code.resize(start, 0);
            function.append_to(&mut code, slot_of);
            let in_frame = |&FoldResult { op, lanes, chain }: &FoldResult| FoldResult {
                op,
                lanes: slot_of(lanes),
                chain: slot_of(chain),
            };
            Function { start, pointers: pointers.clone(), folds: folds.iter().map(in_frame).collect() }
        };
        let list = groups.iter().map(function).collect();
        Functions { memory: Arc::clone(memory), list }
    }

    /// Runs function `k` over the indices (`outside`, `start..start + n`).
    ///
    /// # Panics
    /// If the code memory is not finished.
    ///
    /// # Safety
    /// The contract of `ExecContext::run`.
    #[inline]
    pub(in crate::tile) unsafe fn run(&self, k: u16, site: Site<'_>, outside: usize, start: usize, n: usize) {
        let Function { start: begin, pointers, folds } = &self.list[usize::from(k)];
        let code = self.memory.executable.get().expect("kernels run when their code is finished");
        let code = code[*begin..].as_ptr();
        let mut table = [const { MaybeUninit::<*const u8>::uninit() }; MAX_POINTERS];
        for (at, pointer) in table.iter_mut().zip(pointers) {
            at.write(match *pointer {
                Pointer::Product => site.product,
                Pointer::Load(slot) => {
                    let slot = usize::from(slot);
                    site.loads[slot].address(site.bases[slot], outside, start)
                }
                Pointer::Store(slot) => {
                    let slot = usize::from(slot);
                    site.stores[slot].address(site.bases[site.loads.len() + slot], outside, start)
                }
            });
        }
        let words = MASK_WORDS[ROUND - n % ROUND..].as_ptr();
        // SAFETY: the memory has a function of this type, compiled for the frame of this tile program. The function
        // accesses registers of the frame up to the next multiple of 16 indices, and registers have capacity for these.
        // It accesses callers' memory at the `n` indices, which are valid by the contract. It reads only initialised
        // pointers of the table.
        unsafe {
            let function: EntryPoint = std::mem::transmute(code);
            function(site.frame, table.as_ptr().cast(), n, words);
            for &FoldResult { op, lanes, chain } in folds {
                let lanes = site.frame.add(lanes as usize).cast::<[f32; ROUND]>().read_unaligned();
                let partial = ops::join_lanes(op, lanes);
                (*site.frame.add(chain as usize).cast::<PairwiseSum>()).push(
                    op,
                    Type::F32,
                    u64::from(partial.to_bits()),
                );
            }
        }
    }
}
