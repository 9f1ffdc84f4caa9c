//! Convolutions of any kind, with operands that are packed element by element.

use std::marker::PhantomData;
use std::sync::Arc;

use ortrain_expr::{ConvPass, ConvShape, DType};

use super::epilogue::Epilogue;
use crate::conv::desc::ConvDesc;
use crate::conv::engine::{ConvCandidate, Engine, EngineRun, boxed, choose_micro_kernel};
use crate::conv::rect::Rect;
use crate::gemm::levels::Real;
use crate::gemm::micro::{Factor, Micro, Target};
use crate::gemm::tiles::Side;
use crate::isa::Isa;
use crate::tile::ALIGN;
use crate::tile::number::{Bf16, F16, Stored};

const PANEL_DEPTH: usize = 256;
const ROW_PANELS: usize = 16;
const BLOCK_COLUMNS: usize = 256;

pub(super) struct Fallback<T: 'static> {
    shape: ConvShape,
    dtypes: [DType; 2],
    epilogue: Arc<Epilogue>,
    isa: Isa,
    micro: Micro<T>,
    /// Rows, columns and depth of a group's product.
    m: usize,
    n: usize,
    k: usize,
    rows: usize,
    cols: usize,
    bytes: usize,
    real: PhantomData<T>,
}

/// All convolutions, with operands that are packed element by element.
pub(super) fn candidate<T: Real + Send + Sync>() -> ConvCandidate {
    ConvCandidate {
        name: "conv.fallback",
        accepts: |_| true,
        preferences: &[],
        build: |request| {
            Some(boxed(Fallback::<T>::new(request.desc, request.isa, Arc::clone(request.epilogue))))
        },
    }
}

impl<T: Real> Fallback<T> {
    fn new(desc: &ConvDesc, isa: Isa, finish: Arc<Epilogue>) -> Fallback<T> {
        let shape = &desc.shape;
        let [a, b] = [desc.a, desc.b];
        let dtypes = if shape.pass == ConvPass::FilterGradient { [a, b] } else { [b, a] };
        let micro: Micro<T> = choose_micro_kernel(desc, isa, dtypes);
        let [m, n, k] = shape.product_sides();
        let rows = (ROW_PANELS * micro.mr).min(m.next_multiple_of(micro.mr)).max(micro.mr);
        let cols = BLOCK_COLUMNS.min(n.next_multiple_of(micro.nr)).max(micro.nr);
        let depth = k.min(PANEL_DEPTH);
        let tiles = if micro.tiles.is_some() {
            micro.packed_len(Side::A, rows, depth) + micro.packed_len(Side::B, cols, depth)
        } else {
            0
        };
        let elements = (rows + cols) * depth + rows * cols + tiles;
        let bytes = finish.frame + (elements * T::BYTES).next_multiple_of(ALIGN);
        Fallback {
            shape: shape.clone(),
            dtypes: [desc.a, desc.b],
            epilogue: finish,
            isa,
            micro,
            m,
            n,
            k,
            rows,
            cols,
            bytes,
            real: PhantomData,
        }
    }

    /// Returns the linear input position under a tap of the window at an output position; `None` in the padding.
    fn input_at(&self, mut output: usize, mut tap: usize) -> Option<usize> {
        let (mut index, mut step) = (0, 1);
        for axis in self.shape.axes.iter().rev() {
            index += step * axis.input_at(output % axis.output, tap % axis.kernel)?;
            step *= axis.input;
            output /= axis.output;
            tap /= axis.kernel;
        }
        Some(index)
    }

    /// Returns the linear output position of the window with this tap over an input position.
    fn output_at(&self, mut input: usize, mut tap: usize) -> Option<usize> {
        let (mut index, mut step) = (0, 1);
        for axis in self.shape.axes.iter().rev() {
            let at = (input % axis.input) as isize + axis.padding_before
                - (tap % axis.kernel * axis.dilation) as isize;
            let at = usize::try_from(at).ok()?;
            if at % axis.stride != 0 || at / axis.stride >= axis.output {
                return None;
            }
            index += step * (at / axis.stride);
            step *= axis.output;
            input /= axis.input;
            tap /= axis.kernel;
        }
        Some(index)
    }

    /// Returns the element of the first matrix at a row and a depth of a group's product.
    fn a_element(&self, group: usize, row: usize, depth: usize) -> Option<usize> {
        let ConvShape { groups, channels_in, channels_out, .. } = self.shape;
        let taps: usize = self.shape.axes.iter().map(|axis| axis.kernel).product();
        let outputs: usize = self.shape.axes.iter().map(|axis| axis.output).product();
        Some(match self.shape.pass {
            ConvPass::Output => (group * channels_out + row) * channels_in * taps + depth,
            ConvPass::InputGradient => {
                let (m, tap) = (depth / taps, depth % taps);
                ((group * channels_out + m) * channels_in + row) * taps + tap
            }
            ConvPass::FilterGradient => {
                let (image, position) = (depth / outputs, depth % outputs);
                ((image * groups + group) * channels_out + row) * outputs + position
            }
        })
    }

    /// Returns the element of the second matrix at a column and a depth of a group's product; `None` in the padding.
    fn b_element(&self, group: usize, column: usize, depth: usize) -> Option<usize> {
        let ConvShape { groups, channels_in, channels_out, .. } = self.shape;
        let taps: usize = self.shape.axes.iter().map(|axis| axis.kernel).product();
        let inputs: usize = self.shape.axes.iter().map(|axis| axis.input).product();
        let outputs: usize = self.shape.axes.iter().map(|axis| axis.output).product();
        let input = |image: usize, c: usize, output: usize, tap: usize| {
            Some(((image * groups + group) * channels_in + c) * inputs + self.input_at(output, tap)?)
        };
        match self.shape.pass {
            ConvPass::Output => input(column / outputs, depth / taps, column % outputs, depth % taps),
            ConvPass::FilterGradient => input(depth / outputs, column / taps, depth % outputs, column % taps),
            ConvPass::InputGradient => {
                let (image, position) = (column / inputs, column % inputs);
                let channel = (image * groups + group) * channels_out + depth / taps;
                Some(channel * outputs + self.output_at(position, depth % taps)?)
            }
        }
    }

    /// Packs `lines` lines of an operand into panels.
    unsafe fn pack(
        &self,
        (base, dtype): (*const u8, DType),
        panel: usize,
        (first, lines): (usize, usize),
        depths: (usize, usize),
        to: *mut T,
        at: impl Fn(usize, usize) -> Option<usize>,
    ) {
        for start in (0..lines).step_by(panel) {
            for p in 0..depths.1 {
                for i in 0..panel {
                    let line = start + i;
                    let element = if line < lines { at(first + line, depths.0 + p) } else { None };
                    // SAFETY: elements of the tensor, and `to` has capacity for whole panels.
                    unsafe {
                        let value = element.map_or(T::ZERO, |element| read(base, dtype, element));
                        to.add(start * depths.1 + p * panel + i).write(value);
                    }
                }
            }
        }
    }
}

unsafe fn read<T: Real>(base: *const u8, dtype: DType, element: usize) -> T {
    macro_rules! go {
        ($s:ty) => {{
            // SAFETY: the caller's contract; `T` is the compute type of `dtype`.
            unsafe {
                let value = base.cast::<$s>().add(element).read_unaligned().decode();
                std::mem::transmute_copy(&value)
            }
        }};
    }
    match dtype {
        DType::F32 => go!(f32),
        DType::F64 => go!(f64),
        DType::F16 => go!(F16),
        DType::BF16 => go!(Bf16),
        other => unreachable!("a convolution of {other}: rejected at compile time"),
    }
}

impl<T: Real + Send + Sync> Engine for Fallback<T> {
    fn epilogue(&self) -> &Epilogue {
        &self.epilogue
    }

    fn scratch(&self) -> (usize, usize) {
        (0, self.bytes)
    }

    unsafe fn run_tasks(&self, run: EngineRun<'_>) {
        let EngineRun { settings, parts, .. } = run;
        let (isa, micro) = (self.isa, self.micro);
        let Micro { mr, nr, .. } = micro;
        let (row_blocks, col_blocks) = (self.m.div_ceil(self.rows), self.n.div_ceil(self.cols));
        run.each(self.shape.groups * row_blocks * col_blocks, |bases, task, worker| {
            let _session = micro.open_session();
            let (row, rest) = (task % row_blocks * self.rows, task / row_blocks);
            let (col, group) = (rest % col_blocks * self.cols, rest / col_blocks);
            let (rows, cols) = (self.rows.min(self.m - row), self.cols.min(self.n - col));
            let frame = parts.worker_part(worker);
            // SAFETY: scratch memory has the layout that `new` computed, and the elements are inside of the operands'
            // tensors.
            unsafe {
                let a = frame.add(self.epilogue.frame).cast::<T>();
                let b = a.add(self.rows * self.k.min(PANEL_DEPTH));
                let c = b.add(self.cols * self.k.min(PANEL_DEPTH));
                if self.k == 0 {
                    c.cast::<u8>().write_bytes(0, self.rows * self.cols * T::BYTES);
                }
                for depth in (0..self.k).step_by(PANEL_DEPTH) {
                    let n = PANEL_DEPTH.min(self.k - depth);
                    // The filter is the first matrix, and the windows are the second.
                    let swap = usize::from(self.shape.pass != ConvPass::FilterGradient);
                    let operand = |i: usize| (bases[i ^ swap].cast_const(), self.dtypes[i ^ swap]);
                    self.pack(operand(0), mr, (row, rows), (depth, n), a, |i, p| self.a_element(group, i, p));
                    self.pack(operand(1), nr, (col, cols), (depth, n), b, |j, p| self.b_element(group, j, p));
                    let (mut left, mut right) = (a, b);
                    if micro.tiles.is_some() {
                        left = c.add(self.rows * self.cols);
                        right = left.add(micro.packed_len(Side::A, self.rows, self.k.min(PANEL_DEPTH)));
                        for i in (0..rows).step_by(mr) {
                            let to = left.add(micro.packed_len(Side::A, i, n));
                            micro.pack_from_panel(isa, Side::A, a.add(i * n), mr, (mr.min(rows - i), n), to);
                        }
                        for j in (0..cols).step_by(nr) {
                            let to = right.add(micro.packed_len(Side::B, j, n));
                            micro.pack_from_panel(isa, Side::B, b.add(j * n), nr, (nr.min(cols - j), n), to);
                        }
                    }
                    for j in (0..cols).step_by(nr) {
                        for i in (0..rows).step_by(mr) {
                            let at = left.add(micro.packed_len(Side::A, i, n)).cast_const();
                            let a = Factor { at, line: 1, depth: mr as isize };
                            let at = right.add(micro.packed_len(Side::B, j, n)).cast_const();
                            let b = Factor { at, line: 1, depth: nr as isize };
                            let c = Target { at: c.add(i * self.cols + j), row: self.cols as isize };
                            let size = (mr.min(rows - i), nr.min(cols - j));
                            micro.multiply(isa, size, n, a, b, c, depth > 0);
                        }
                    }
                }
                let channel = group * self.m + row;
                let plane =
                    if self.shape.pass == ConvPass::FilterGradient { self.n } else { self.epilogue.plane };
                let mut j = 0;
                while j < cols {
                    let (image, position) = ((col + j) / plane, (col + j) % plane);
                    let count = (plane - position).min(cols - j);
                    let rect = Rect { image, channels: (channel, rows), positions: (position, count) };
                    self.epilogue.run(bases, settings, frame, rect, c.add(j), self.cols);
                    j += count;
                }
            }
        });
    }
}
