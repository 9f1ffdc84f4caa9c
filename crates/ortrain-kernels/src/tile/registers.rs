//! Allocation of the registers of a tile program in the frame of a worker.

use std::sync::Arc;

use super::compiler::{LANES_BYTES, Section, TileCompiler};
use super::jit::{CodeMemory, Functions};
use super::memory::width;
use super::op::{Kind, RegisterKind, Slot};
use super::pairwise_sum::PairwiseSum;
use super::program::{Code, FrameHeader, Stage, StageReduction};
use crate::isa::Isa;
use crate::scratch::ALIGN;

impl TileCompiler<'_> {
    /// Returns the live ranges of tile registers: (register, first and last position).
    fn lifetimes(&self) -> Vec<(usize, usize, usize)> {
        const FOREVER: usize = usize::MAX;
        let mut first = vec![None; self.registers.len()];
        let mut last = vec![0; self.registers.len()];
        let mut position = 0;
        for (section, list) in &self.lists {
            let end = position + list.len();
            for op in list {
                position += 1;
                let (reads, writes) = match op.kind {
                    Kind::Native(k) => {
                        let group = &self.groups[usize::from(k)];
                        (group.reads(), group.writes())
                    }
                    _ => (op.a.as_slice(), std::slice::from_ref(&op.d)),
                };
                for &slot in writes {
                    first[slot as usize].get_or_insert(position);
                }
                for &slot in reads.iter().chain(writes) {
                    let index = slot as usize;
                    // A value from outside of a loop must live until the loop ends.
                    let looped = matches!(section, Section::Body(_)) && self.registers[index].1 != *section;
                    last[index] = last[index].max(if looped { end } else { position });
                }
            }
        }
        let tiles =
            self.registers.iter().enumerate().filter(|(_, (size, _))| matches!(size, RegisterKind::Tile(_)));
        tiles
            .map(|(i, (_, section))| match section {
                // Computed once for many passes through the other sections.
                Section::Once => (i, 0, FOREVER),
                _ => (i, first[i].unwrap_or(0), last[i]),
            })
            .collect()
    }

    /// Assigns a slot to each tile register. Returns the slots, and the number of slots in use.
    pub(super) fn assign_slots(&self) -> (Vec<usize>, usize) {
        let mut lifetimes = self.lifetimes();
        lifetimes.sort_by_key(|&(register, first, _)| (first, register));
        let mut slots = vec![0; self.registers.len()];
        let mut free_from: Vec<usize> = Vec::new();
        for (register, first, last) in lifetimes {
            // Strictly before: a result never gets the slot of an operand that ends at the same operation.
            let slot = free_from.iter().position(|&end| end < first).unwrap_or_else(|| {
                free_from.push(0);
                free_from.len() - 1
            });
            free_from[slot] = last;
            slots[register] = slot;
        }
        (slots, free_from.len())
    }

    /// Returns the bytes of one slot.
    pub(super) fn slot_bytes(&self, tile: usize) -> usize {
        let widths = self.registers.iter().map(|(size, _)| match size {
            RegisterKind::Tile(ty) => width(*ty),
            _ => 0,
        });
        // Slots at distances of 4096 bytes would alias in the store buffer.
        (tile * widths.max().unwrap_or(0)).next_multiple_of(ALIGN) + ALIGN
    }

    fn fixed_bytes(&self) -> usize {
        let sizes = self.registers.iter().map(|(size, _)| match size {
            RegisterKind::Uniform => 8,
            RegisterKind::Tile(_) | RegisterKind::Direct(_) | RegisterKind::DirectUniform(_) => 0,
            RegisterKind::PairwiseSum => size_of::<PairwiseSum>(),
            RegisterKind::Lanes => LANES_BYTES,
        });
        (size_of::<FrameHeader>() + sizes.sum::<usize>()).next_multiple_of(ALIGN)
    }

    pub(super) fn bytes(&self, tile: usize, slots: usize) -> usize {
        self.fixed_bytes() + slots * self.slot_bytes(tile)
    }

    /// Assigns an offset in the frame to every register.
    pub(super) fn assign_offsets(self, isa: Isa, memory: Option<&Arc<CodeMemory>>, tile: usize) -> Code {
        let (slots, count) = self.assign_slots();
        let frame = self.bytes(tile, count);
        let (slot_bytes, tiles) = (self.slot_bytes(tile), self.fixed_bytes());
        let mut fixed = size_of::<FrameHeader>();
        let offsets: Vec<Slot> = self
            .registers
            .iter()
            .zip(&slots)
            .map(|((size, _), &slot)| {
                let frame_offset = match size {
                    RegisterKind::Direct(there) | RegisterKind::DirectUniform(there) => return *there,
                    RegisterKind::Tile(_) => tiles + slot * slot_bytes,
                    RegisterKind::Uniform => {
                        fixed += 8;
                        fixed - 8
                    }
                    RegisterKind::PairwiseSum => {
                        fixed += size_of::<PairwiseSum>();
                        fixed - size_of::<PairwiseSum>()
                    }
                    RegisterKind::Lanes => {
                        fixed += LANES_BYTES;
                        fixed - LANES_BYTES
                    }
                };
                frame_offset as Slot
            })
            .collect();
        let offset_of = |register: Slot| offsets.get(register as usize).copied().unwrap_or(0);
        let functions = Functions::new(&self.groups, &offset_of, memory.unwrap_or(&Arc::default()));
        let mut code = Code {
            isa,
            per_run: Vec::new(),
            stages: vec![Stage::default(); self.totals.len()],
            post: Vec::new(),
            functions,
            tile,
            piece: self.piece,
            frame,
            num_saved: self.saved.len(),
            can_fail: self.expr.can_fail(),
            cost: self.cost,
        };
        for (section, mut list) in self.lists {
            for op in &mut list {
                op.d = offset_of(op.d);
                op.a = op.a.map(offset_of);
            }
            match section {
                Section::Once => code.per_run = list,
                Section::Pre(stage) => code.stages[stage].pre = list,
                Section::Body(stage) => code.stages[stage].body = list,
                Section::Post => code.post = list,
            }
        }
        for (stage, totals) in code.stages.iter_mut().zip(self.totals) {
            stage.reductions = totals
                .into_iter()
                .map(|total| StageReduction {
                    state: offset_of(total.state),
                    result: offset_of(total.result),
                    ..total
                })
                .collect();
        }
        code
    }
}
