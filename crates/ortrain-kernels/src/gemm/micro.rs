//! Micro-kernels: the innermost functions of matrix products.

use super::arithmetic::Arithmetic;
use super::byte_tiles::{self, ByteProducts, ZeroPoints};
use super::corner_copy::CornerCopy;
use super::pack::{Block, Elements, pack};
use super::tiles::{self, Session, Side, Tiles};
use crate::isa::Isa;

#[cfg(target_arch = "x86_64")]
pub(super) use crate::isa::prefetch;

/// Micro-kernel: multiplies a few rows of A with a few columns of B, with the sums in registers.
#[derive(Clone, Copy)]
pub(crate) struct Micro<T: 'static> {
    /// Maximum number of rows.
    pub(crate) mr: usize,
    /// Number of columns, always all of them.
    pub(crate) nr: usize,
    /// One function for each number of rows from 1 on.
    pub(crate) run: &'static [MicroKernelFn<T>],
    /// Functions for half of the columns, if they are faster.
    pub(crate) half_width: Option<&'static [MicroKernelFn<T>]>,
    /// Products of tiles instead of the functions: both operands are packed.
    pub(crate) tiles: Option<TileProducts>,
}

/// Products of packed tiles.
#[derive(Clone, Copy)]
pub(crate) enum TileProducts {
    /// Terms in bfloat16, with sums in `f32`.
    Bf16(Tiles),
    /// Bytes, with sums in `i32`.
    Bytes(ByteProducts),
}

impl TileProducts {
    /// Returns the unit of rows of a block, and the unit of the depth of a chunk.
    fn block_units(self) -> (usize, usize) {
        match self {
            TileProducts::Bf16(_) => (tiles::LINES, tiles::DEPTHS),
            TileProducts::Bytes(_) => (byte_tiles::LINES, byte_tiles::DEPTHS),
        }
    }

    /// Returns the bytes of an element in a panel.
    fn element_bytes(self) -> usize {
        match self {
            TileProducts::Bf16(_) => size_of::<f32>(),
            TileProducts::Bytes(_) => 1,
        }
    }

    /// Returns the bytes of packed panels of `lines` lines, a number of whole panels.
    fn packed_bytes(self, side: Side, lines: usize, depth: usize) -> usize {
        match self {
            // Each term has two bytes.
            TileProducts::Bf16(tiles) => {
                let depth = depth.div_ceil(tiles::DEPTHS) * (tiles::DEPTHS * 2 * tiles.terms(side));
                lines.saturating_mul(depth)
            }
            TileProducts::Bytes(_) => {
                lines.saturating_mul(byte_tiles::panel_bytes(depth) / byte_tiles::LINES)
            }
        }
    }
}

/// Operand of a micro-kernel: address, and the steps from line to line and from depth to depth. The steps are unused
/// for packed tiles.
#[derive(Clone, Copy)]
pub(crate) struct Factor<T> {
    pub(crate) at: *const T,
    pub(crate) line: isize,
    pub(crate) depth: isize,
}

/// Destination of a micro-kernel: address, and step from row to row; columns are adjacent.
#[derive(Clone, Copy)]
pub(crate) struct Target<T> {
    pub(crate) at: *mut T,
    pub(crate) row: isize,
}

impl<T: Arithmetic> Micro<T> {
    /// Opens the session that products need while a thread computes them.
    pub(crate) fn open_session(&self) -> Session {
        match &self.tiles {
            Some(TileProducts::Bf16(tiles)) => Session::open(Some(tiles)),
            _ => Session::open(None),
        }
    }

    /// Returns the unit of rows of a block, and the unit of the depth of a chunk.
    pub(crate) fn block_units(&self) -> (usize, usize) {
        self.tiles.map_or((1, 8), TileProducts::block_units)
    }

    /// Returns the bytes of an element in a panel, by which the depth of a chunk is chosen.
    pub(crate) fn element_bytes(&self) -> usize {
        self.tiles.map_or(T::BYTES, TileProducts::element_bytes)
    }

    /// Returns the number of rows of the panels into which `m` rows are cut: as even as possible.
    pub(crate) fn panel_rows(&self, m: usize) -> usize {
        if self.tiles.is_some() { self.mr } else { m.div_ceil(m.div_ceil(self.mr).max(1)).max(1) }
    }

    /// Returns the unit in which the columns of a narrow panel cost time.
    pub(crate) fn column_unit(&self) -> usize {
        if self.tiles.is_some() || self.half_width.is_some() { self.nr / 2 } else { self.nr }
    }

    /// Returns the number of elements of packed panels of `lines` lines, a number of whole panels.
    pub(crate) fn packed_len(&self, side: Side, lines: usize, depth: usize) -> usize {
        match self.tiles {
            None => lines.saturating_mul(depth),
            Some(tiles) => tiles.packed_bytes(side, lines, depth) / T::BYTES,
        }
    }

    /// Returns an operand from line `first` on. If the operand is packed, `first` is the first line of a panel.
    pub(crate) fn at_line(&self, operand: Factor<T>, side: Side, first: usize, depth: usize) -> Factor<T> {
        let step = match self.tiles {
            None => first as isize * operand.line,
            Some(_) => self.packed_len(side, first, depth) as isize,
        };
        Factor { at: operand.at.wrapping_offset(step), ..operand }
    }

    /// Packs a block of A or B into panels.
    ///
    /// # Safety
    /// As [`pack`]; `to` has the capacity of [`Micro::packed`] elements.
    pub(crate) unsafe fn pack(
        &self,
        isa: Isa,
        elements: impl Into<Elements>,
        block: Block,
        side: Side,
        to: *mut T,
    ) {
        // SAFETY: the caller's contract.
        unsafe { self.pack_without(isa, elements, (block, ZeroPoints::ZEROS), side, to) };
    }

    /// Packs a block of A or B into panels. Products of bytes subtract the zero points.
    ///
    /// # Safety
    /// As [`Micro::pack`]; the zero points are valid for reads.
    pub(crate) unsafe fn pack_without(
        &self,
        isa: Isa,
        elements: impl Into<Elements>,
        (block, zero_points): (Block, ZeroPoints),
        side: Side,
        to: *mut T,
    ) {
        let elements = elements.into();
        // SAFETY: the caller's contract; tiles exist for products in f32 and i32 only.
        unsafe {
            match self.tiles {
                None => {
                    let panel = if side == Side::A { self.mr } else { self.nr };
                    pack(isa, elements, block, panel, to);
                }
                Some(TileProducts::Bf16(tiles)) => {
                    tiles::pack(isa, elements, block, (side, tiles.terms(side)), to.cast());
                }
                Some(TileProducts::Bytes(bytes)) => {
                    bytes.pack(isa, elements.stored, (block, zero_points), side, to.cast());
                }
            }
        }
    }

    /// Converts a panel of plain elements, in which the distance between depths is `pitch`, to packed panels of A or B.
    /// Does nothing if plain elements are multiplied as they are.
    ///
    /// # Safety
    /// As [`tiles::pack_from_panel`].
    pub(crate) unsafe fn pack_from_panel(
        &self,
        isa: Isa,
        side: Side,
        from: *const T,
        pitch: usize,
        size: (usize, usize),
        to: *mut T,
    ) {
        if let Some(TileProducts::Bf16(tiles)) = self.tiles {
            // SAFETY: the caller's contract; tiles exist for products in f32 only.
            unsafe { tiles::pack_panel(isa, (side, tiles.terms(side)), from.cast(), pitch, size, to.cast()) };
        }
    }

    /// Returns true if panels of `cols` columns are nearly full.
    pub(crate) fn fills_panels(&self, cols: usize) -> bool {
        let narrow = cols % self.nr;
        let rest = if narrow == 0 { 0 } else { self.written_columns(narrow) };
        8 * (cols - narrow + rest) <= 9 * cols
    }

    /// Returns the number of columns that [`Micro::multiply`] writes for `cols` columns.
    pub(crate) fn written_columns(&self, cols: usize) -> usize {
        match self.half_width {
            _ if self.tiles.is_some() => cols,
            Some(_) if 2 * cols <= self.nr => self.nr / 2,
            _ => self.nr,
        }
    }

    /// Computes `C = A·B`, or `C += A·B`, of at most [`Micro::mr`] rows and [`Micro::nr`] columns. Writes
    /// [`Micro::columns`] columns. Each sum over the depth starts at zero, has one order, and is then added. Lines of B
    /// are adjacent.
    ///
    /// # Safety
    /// As [`Run`]; for tiles, the contract of [`Tiles::multiply`].
    pub(crate) unsafe fn multiply(
        &self,
        isa: Isa,
        (rows, cols): (usize, usize),
        depth: usize,
        a: Factor<T>,
        b: Factor<T>,
        c: Target<T>,
        add: bool,
    ) {
        let (factors, size) = ((a.at.cast(), b.at.cast()), (rows, cols));
        // SAFETY: the caller's contract; tiles exist for products in f32 and i32 only.
        unsafe {
            match &self.tiles {
                Some(TileProducts::Bf16(tiles)) => {
                    return tiles.multiply(isa, size, depth, factors, c.at.cast(), c.row, add);
                }
                Some(TileProducts::Bytes(bytes)) => {
                    return bytes.multiply(isa, size, depth, factors, c.at.cast(), c.row, add);
                }
                None => {}
            }
            let run = self.half_width.filter(|_| 2 * cols <= self.nr).unwrap_or(self.run);
            run[rows - 1](depth, a.at, a.line, a.depth, b.at, b.depth, c.at, c.row, add);
        }
    }

    /// Computes as [`Micro::multiply`], but writes only the existing columns: narrow results are copied from `corner`,
    /// a block of whole panels.
    ///
    /// # Safety
    /// As [`Micro::multiply`]; the corner is valid for writes.
    pub(crate) unsafe fn multiply_partial(
        &self,
        isa: Isa,
        (rows, cols): (usize, usize),
        depth: usize,
        a: Factor<T>,
        b: Factor<T>,
        c: Target<T>,
        add: bool,
        corner: *mut T,
    ) {
        // SAFETY: the caller's contract.
        unsafe {
            if self.written_columns(cols) == cols {
                self.multiply(isa, (rows, cols), depth, a, b, c, add);
            } else {
                let some = Target { at: corner, row: self.nr as isize };
                self.multiply(isa, (rows, cols), depth, a, b, some, false);
                let (to, to_row) = (c.at, c.row);
                isa.run(CornerCopy { from: corner, from_row: self.nr, to, to_row, size: (rows, cols), add });
            }
        }
    }
}

/// `C = A·B`, or `C += A·B` if the last argument is true. Arguments: k; A, its steps by row and by column; B, its step
/// by row (columns are adjacent); C, its step by row (columns are adjacent). Each sum over k is in order, and then
/// added.
///
/// # Safety
/// The elements of A, B and C that the sizes and steps address are valid for reads, and the elements of C for writes.
/// The machine has the level of the kernel.
pub(crate) type MicroKernelFn<T> =
    unsafe fn(usize, *const T, isize, isize, *const T, isize, *mut T, isize, bool);

/// Dot products of a few lines with a few lines, both with elements adjacent along k. The sums are in registers.
#[derive(Clone, Copy)]
pub(crate) struct DotKernels<T: 'static> {
    /// Functions for 1, 2, ... lines of the first operand and one line of the second.
    pub(crate) single: &'static [DotKernelFn<T>],
    /// Functions for 1, 2, ... lines of the first operand and `width` lines of the second.
    pub(crate) several: &'static [DotKernelFn<T>],
    pub(crate) width: usize,
}

/// Arguments: k; A, its step from line to line; B, its step from line to line; C, its steps by line of A and by line of
/// B; true to add to C. A sum has one chain per lane of a register. The chains are joined as a tree, and then added.
///
/// # Safety
/// As [`Run`].
pub(crate) type DotKernelFn<T> =
    unsafe fn(usize, *const T, isize, *const T, isize, *mut T, isize, isize, bool);

/// Memory layouts of A and B with specialized loops in micro-kernels: constant steps need no arithmetic.
#[cfg(target_arch = "x86_64")]
pub(super) mod operand_layout {
    /// Any layout.
    pub(in super::super) const ANY: u8 = 0;
    /// Packed into panels.
    pub(in super::super) const PACKED: u8 = 1;
    /// Adjacent along k: for A only.
    pub(in super::super) const ADJACENT_ALONG_K: u8 = 2;
}

/// Unroll factor: number of depths per iteration of a micro-kernel.
#[cfg(target_arch = "x86_64")]
pub(super) const UNROLLED_DEPTHS: usize = 4;

/// Defines a micro-kernel of `M` rows and `V` registers of columns, for panels of `$mr` rows.
#[cfg(target_arch = "x86_64")]
macro_rules! micro_kernel {
    (
        $name:ident, $lying:ident, $features:literal, $t:ty, $lanes:literal, $mr:literal,
        $zero:ident, $load:ident, $store:ident, $set:ident, $add:ident, $fma:ident
    ) => {
        /// # Safety
        /// The contract of [`super::micro::Run`].
        #[target_feature(enable = $features)]
        unsafe fn $name<const M: usize, const V: usize>(
            k: usize,
            a: *const $t,
            a_row: isize,
            a_col: isize,
            b: *const $t,
            b_row: isize,
            c: *mut $t,
            c_row: isize,
            add: bool,
        ) {
            let run = match (a_row, a_col, b_row == (V * $lanes) as isize) {
                (1, $mr, true) => $lying::<M, V, { operand_layout::PACKED }, { operand_layout::PACKED }>,
                (1, $mr, false) => $lying::<M, V, { operand_layout::PACKED }, { operand_layout::ANY }>,
                (_, 1, true) => {
                    $lying::<M, V, { operand_layout::ADJACENT_ALONG_K }, { operand_layout::PACKED }>
                }
                _ => $lying::<M, V, { operand_layout::ANY }, { operand_layout::ANY }>,
            };
            // SAFETY: the caller's contract; the steps have the values that the function assumes.
            unsafe { run(k, a, a_row, a_col, b, b_row, c, c_row, add) }
        }

        /// Computes the product for the given [layouts](lie) of A and B.
        ///
        /// # Safety
        /// The contract of [`super::micro::Run`], and the steps have these layouts.
        #[target_feature(enable = $features)]
        unsafe fn $lying<const M: usize, const V: usize, const A: u8, const B: u8>(
            k: usize,
            mut a: *const $t,
            a_row: isize,
            a_col: isize,
            mut b: *const $t,
            b_row: isize,
            c: *mut $t,
            c_row: isize,
            add: bool,
        ) {
            let (a_row, a_col) = match A {
                operand_layout::PACKED => (1, $mr),
                operand_layout::ADJACENT_ALONG_K => (a_row, 1),
                _ => (a_row, a_col),
            };
            let b_row = if B == operand_layout::PACKED { (V * $lanes) as isize } else { b_row };
            // SAFETY: the caller's contract: all elements that the strides address are valid.
            unsafe {
                let mut sums = [[$zero(); V]; M];
                // Prefetches C, which is needed after the sums.
                for i in 0..M {
                    (0..V).for_each(|v| {
                        prefetch(c.wrapping_offset(i as isize * c_row).wrapping_add(v * $lanes))
                    });
                }
                let step = |sums: &mut [[_; V]; M], a: *const $t, b: *const $t| {
                    let mut line = [$zero(); V];
                    for (v, line) in line.iter_mut().enumerate() {
                        *line = $load(b.add(v * $lanes));
                    }
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let x = $set(a.wrapping_offset(i as isize * a_row).read_unaligned());
                        for (sum, &y) in sums.iter_mut().zip(&line) {
                            *sum = $fma(x, y, *sum);
                        }
                    }
                };
                for _ in 0..k / UNROLLED_DEPTHS {
                    for p in 0..UNROLLED_DEPTHS as isize {
                        step(&mut sums, a.wrapping_offset(p * a_col), b.wrapping_offset(p * b_row));
                    }
                    a = a.wrapping_offset(UNROLLED_DEPTHS as isize * a_col);
                    b = b.wrapping_offset(UNROLLED_DEPTHS as isize * b_row);
                }
                for _ in 0..k % UNROLLED_DEPTHS {
                    step(&mut sums, a, b);
                    a = a.wrapping_offset(a_col);
                    b = b.wrapping_offset(b_row);
                }
                for (i, sums) in sums.into_iter().enumerate() {
                    let c = c.wrapping_offset(i as isize * c_row);
                    for (v, sum) in sums.into_iter().enumerate() {
                        let c = c.add(v * $lanes);
                        $store(c, if add { $add($load(c), sum) } else { sum });
                    }
                }
            }
        }
    };
}

/// Defines a micro-kernel of dot products of `M` lines with `N` lines, at most `$width`. `$join` sums the lanes of
/// `$width` registers as trees, each into the first lane of its part of a register.
#[cfg(target_arch = "x86_64")]
macro_rules! dots_kernel {
    (
        $name:ident, $features:literal, $t:ty, $lanes:literal, $width:literal,
        $zero:ident, $load:ident, $store:ident, $fma:ident, $join:ident
    ) => {
        /// # Safety
        /// The contract of [`super::micro::DotKernelFn`].
        #[target_feature(enable = $features)]
        unsafe fn $name<const M: usize, const N: usize>(
            k: usize,
            a: *const $t,
            a_line: isize,
            b: *const $t,
            b_line: isize,
            c: *mut $t,
            c_row: isize,
            c_col: isize,
            add: bool,
        ) {
            // SAFETY: the caller's contract: all elements that the steps address are valid.
            unsafe {
                let mut sums = [[$zero(); N]; M];
                let aligned_len = k - k % $lanes;
                for p in (0..aligned_len).step_by($lanes) {
                    let mut lines = [$zero(); N];
                    for (j, line) in lines.iter_mut().enumerate() {
                        *line = $load(b.wrapping_offset(j as isize * b_line).wrapping_add(p));
                    }
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let x = $load(a.wrapping_offset(i as isize * a_line).wrapping_add(p));
                        for (sum, &y) in sums.iter_mut().zip(&lines) {
                            *sum = $fma(x, y, *sum);
                        }
                    }
                }
                if aligned_len < k {
                    let rest = |line: *const $t| {
                        let mut lanes: [$t; $lanes] = [0.0; $lanes];
                        (aligned_len..k).for_each(|p| lanes[p - aligned_len] = line.add(p).read_unaligned());
                        $load(lanes.as_ptr())
                    };
                    let mut lines = [$zero(); N];
                    for (j, line) in lines.iter_mut().enumerate() {
                        *line = rest(b.wrapping_offset(j as isize * b_line));
                    }
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let x = rest(a.wrapping_offset(i as isize * a_line));
                        for (sum, &y) in sums.iter_mut().zip(&lines) {
                            *sum = $fma(x, y, *sum);
                        }
                    }
                }
                for (i, sums) in sums.into_iter().enumerate() {
                    let mut some = [$zero(); $width];
                    some[..N].copy_from_slice(&sums);
                    let mut lanes: [$t; $lanes] = [0.0; $lanes];
                    $store(lanes.as_mut_ptr(), $join(some));
                    for j in 0..N {
                        let sum = lanes[j * $lanes / $width];
                        let c = c.wrapping_offset(i as isize * c_row + j as isize * c_col);
                        c.write_unaligned(if add { c.read_unaligned() + sum } else { sum });
                    }
                }
            }
        }
    };
}

/// Lists the functions of a micro-kernel for each number of rows.
#[cfg(target_arch = "x86_64")]
macro_rules! rows {
    ($name:ident, $v:literal, $($m:literal)*) => { &[$($name::<$m, $v>),*] };
}

/// Lists the functions of a micro-kernel of dot products.
#[cfg(target_arch = "x86_64")]
macro_rules! dots {
    ($name:ident, $n:literal) => {
        &[$name::<1, $n>, $name::<2, $n>, $name::<3, $n>, $name::<4, $n>]
    };
}

#[cfg(target_arch = "x86_64")]
pub(super) use {dots, dots_kernel, micro_kernel, rows};
