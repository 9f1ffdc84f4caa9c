//! Last steps of the compilation: operations that run together become functions of machine code.

use std::sync::Arc;

use ortrain_expr::{BinaryOp, Type};
use rustc_hash::{FxHashMap, FxHashSet};

use super::compiler::{Section, TileCompiler};
use super::jit::{self, CodeMemory, Context, Group};
use super::loop_plan::LoopPlan;
use super::memory::StridedView;
use super::op::{Kind, Op, RegisterKind, Slot};
use super::program::Code;
use crate::isa::Isa;

impl TileCompiler<'_> {
    /// Finishes the code, with machine code if there is memory for it. Tiles and the order of sums do not depend on
    /// machine code.
    pub(super) fn finish(
        mut self,
        isa: Isa,
        memory: Option<&Arc<CodeMemory>>,
        stores: &[StridedView],
        tile: usize,
    ) -> Code {
        self.compare_coordinates();
        self.gather_to_row_loads();
        if memory.is_some() {
            self.group_sections(isa, stores, tile);
        }
        self.assign_offsets(isa, memory, tile)
    }

    /// Compares coordinates with one number directly, instead of writing both over a tile first.
    fn compare_coordinates(&mut self) {
        let mut producer_by_slot: FxHashMap<Slot, Op> = FxHashMap::default();
        for op in self.lists.iter().flat_map(|(_, list)| list) {
            if matches!(op.kind, Kind::Coordinate { along: true, .. } | Kind::Splat(Type::I64)) {
                producer_by_slot.insert(op.d, *op);
            }
        }
        for op in self.lists.iter_mut().flat_map(|(_, list)| list) {
            let Kind::Compare(compare, Type::I64) = op.kind else { continue };
            let [a, b] = [op.a[0], op.a[1]]
                .map(|slot| producer_by_slot.get(&slot).map(|producer| (producer.kind, producer.a[0])));
            let (coordinate, uniform, first) = match (a, b) {
                (Some((kind, _)), Some((Kind::Splat(_), one))) => (kind, one, true),
                (Some((Kind::Splat(_), one)), Some((kind, _))) => (kind, one, false),
                _ => continue,
            };
            let Kind::Coordinate { after, dim, .. } = coordinate else { continue };
            op.kind = Kind::CompareCoordinate { op: compare, first, after, dim };
            op.a = [uniform, 0, 0];
        }
        self.drop_unread_ops(&producer_by_slot);
    }

    /// Loads a row of consecutive elements from its first index, instead of writing the index of every element over a
    /// tile first. Examples are embeddings and the steps of a sequence.
    fn gather_to_row_loads(&mut self) {
        let LoopPlan { nest, tile_axes: along, .. } = *self.plan;
        let row_len: usize = along.iter().map(|&axis| nest.dims[axis]).product();
        let mut producer_by_slot: FxHashMap<Slot, Op> = FxHashMap::default();
        let mut sums: FxHashMap<Slot, Op> = FxHashMap::default();
        for op in self.lists.iter().flat_map(|(_, list)| list).filter(|op| !op.is_uniform) {
            match op.kind {
                Kind::Coordinate { along: true, .. } | Kind::Splat(Type::I64) => {
                    _ = producer_by_slot.insert(op.d, *op);
                }
                Kind::Binary(BinaryOp::Add, Type::I64) => _ = sums.insert(op.d, *op),
                _ => {}
            }
        }
        for op in self.lists.iter_mut().flat_map(|(_, list)| list).filter(|op| !op.is_uniform) {
            let (Kind::LoadAt(slot), Some(sum)) = (op.kind, sums.get(&op.a[0])) else { continue };
            let [a, b] = [sum.a[0], sum.a[1]].map(|source_slot| {
                producer_by_slot.get(&source_slot).map(|producer| (producer.kind, producer.a[0]))
            });
            let terms = || [a, b].into_iter().flatten();
            let first = terms().find(|(kind, _)| matches!(kind, Kind::Splat(_)));
            // Only the linear index along the whole tile counts up by one from element to element.
            let counts =
                |kind: Kind| matches!(kind, Kind::Coordinate { after: 1, dim, .. } if dim == row_len);
            if let (Some((_, first)), true) = (first, terms().any(|(kind, _)| counts(kind))) {
                op.kind = Kind::LoadRow(slot);
                op.a = [first, 0, 0];
            }
        }
        self.drop_unread_ops(&sums);
        self.drop_unread_ops(&producer_by_slot);
    }

    /// Drops each operation of `some` if its result is not read any more.
    fn drop_unread_ops(&mut self, some: &FxHashMap<Slot, Op>) {
        if some.is_empty() {
            return;
        }
        let ops = self.lists.iter().flat_map(|(_, list)| list);
        let read: FxHashSet<Slot> = ops.flat_map(|op| op.a.into_iter().take(op.kind.operands())).collect();
        for (_, list) in &mut self.lists {
            list.retain(|op| !some.contains_key(&op.d) || read.contains(&op.d));
        }
    }

    /// Groups the operations that machine code supports.
    fn group_sections(&mut self, isa: Isa, stores: &[StridedView], tile: usize) {
        let mut readers: FxHashMap<Slot, usize> = FxHashMap::default();
        let mut constants: FxHashMap<Slot, u64> = FxHashMap::default();
        for op in self.lists.iter().flat_map(|(_, list)| list) {
            for slot in &op.a[..op.kind.operands()] {
                *readers.entry(*slot).or_default() += 1;
            }
            if let Kind::Const(bits) = op.kind {
                constants.insert(op.d, bits);
            }
        }
        for index in 0..self.lists.len() {
            let list = std::mem::take(&mut self.lists[index].1);
            let list = self.group_ops(isa, (stores, tile), list, &readers, &constants);
            self.lists[index].1 = list;
        }
    }

    /// Groups the operations of a list, each group as large as the dependencies allow.
    fn group_ops(
        &mut self,
        isa: Isa,
        (stores, tile): (&[StridedView], usize),
        list: Vec<Op>,
        readers: &FxHashMap<Slot, usize>,
        constants: &FxHashMap<Slot, u64>,
    ) -> Vec<Op> {
        let sizes: Vec<RegisterKind> = self.registers.iter().map(|(size, _)| *size).collect();
        let context = Context {
            isa,
            sizes: &|slot| sizes[slot as usize],
            constants,
            loads: self.loads,
            stores,
            readers,
            piece: self.piece,
            tile,
        };
        let is_store = |op: &Op| matches!(op.kind, Kind::Store(_));
        let (stores, mut rest): (Vec<Op>, Vec<Op>) = list.into_iter().partition(is_store);
        let mut missing: Vec<Slot> = rest.iter().filter(|op| op.kind.has_result()).map(|op| op.d).collect();
        let ready =
            |op: &Op, missing: &[Slot]| op.a[..op.kind.operands()].iter().all(|slot| !missing.contains(slot));
        let mut done = Vec::new();
        let mut group: Vec<Op> = Vec::new();
        while !rest.is_empty() {
            let mut later = Vec::new();
            for op in std::mem::take(&mut rest) {
                if !jit::takes(&op, &context) && ready(&op, &missing) {
                    missing.retain(|&slot| slot != op.d);
                    done.push(op);
                } else {
                    later.push(op);
                }
            }
            // Uniform operations come first, because tiles may need their results. A function never mixes both.
            for is_uniform in [true, false] {
                rest = Vec::new();
                for op in std::mem::take(&mut later) {
                    if op.is_uniform == is_uniform && jit::takes(&op, &context) && ready(&op, &missing) {
                        missing.retain(|&slot| slot != op.d || !op.kind.has_result());
                        group.push(op);
                    } else {
                        rest.push(op);
                    }
                }
                if is_uniform {
                    self.compile_group(std::mem::take(&mut group), &context, &mut done);
                    later = std::mem::take(&mut rest);
                }
            }
            if !rest.is_empty() {
                self.compile_group(std::mem::take(&mut group), &context, &mut done);
            }
        }
        // All loads come before all stores.
        let (together, separate): (Vec<Op>, Vec<Op>) =
            stores.into_iter().partition(|op| jit::takes(op, &context));
        group.extend(together);
        self.compile_group(group, &context, &mut done);
        done.extend(separate);
        done
    }

    /// Compiles a list of operations to one function. If that fails, tries each half; a single operation stays
    /// interpreted.
    fn compile_group(&mut self, list: Vec<Op>, context: &Context<'_>, done: &mut Vec<Op>) {
        if list.is_empty() {
            return;
        }
        let registers = &mut self.registers;
        let lanes_of = || {
            registers.push((RegisterKind::Lanes, Section::Once));
            (registers.len() - 1) as Slot
        };
        if let Some(group) = Group::new(&list, context, lanes_of) {
            let kind = Kind::Native(self.groups.len() as u16);
            self.groups.push(group);
            done.push(Op {
                kind,
                is_uniform: list[0].is_uniform,
                d: 0,
                a: [0; 3],
                uniform_operands: [false; 3],
            });
        } else if list.len() == 1 {
            done.extend(list);
        } else {
            let mut first = list;
            let second = first.split_off(first.len() / 2);
            self.compile_group(first, context, done);
            self.compile_group(second, context, done);
        }
    }

    /// Forgets the values that a section has computed.
    pub(super) fn forget_section(&mut self, section: Section) {
        for slot in self.value.iter_mut().chain(&mut self.splat) {
            if slot.is_some_and(|slot| self.registers[slot as usize].1 == section) {
                *slot = None;
            }
        }
    }
}
