//! Micro-kernels that read windows directly instead of from packed panels: vectors of positions for a few channels of
//! the result, or single elements for vectors of channels.

#[cfg(target_arch = "x86_64")]
use x86::{avx2_channels, avx512_channels};

use crate::isa::{Isa, Kind};

/// Micro-kernels that multiply the weights of a few rows with a few vectors, and hold the sums in registers.
#[derive(Clone, Copy)]
pub(super) struct PositionKernels {
    /// Number of rows, and number of elements of a vector.
    pub(super) rows: usize,
    pub(super) lanes: usize,
    /// Functions for 1, 2, ... vectors.
    pub(super) run: &'static [PositionKernel],
}

/// Arguments, in this order:
/// - number of terms of a sum;
/// - for each term its offset;
/// - for each term the weights of all rows;
/// - for each vector its address at offset zero;
/// - for each vector its position in the result;
/// - the result, and its step from row to row;
/// - true to add to the result.
///
/// A sum is computed in order, and then added. In each row, all vectors of the result are read before the first one is
/// stored. They are stored in order, because a vector may reach into the next one.
///
/// # Safety
/// The elements are valid for reads, and the elements of the result for writes. The machine has the instruction-set
/// level.
pub(super) type PositionKernel =
    unsafe fn(usize, *const u32, *const f32, *const *const f32, *const usize, *mut f32, usize, bool);

/// Maximum number of vectors of a function, at any level.
pub(super) const MAX_VECTORS: usize = 3;

impl PositionKernels {
    pub(super) fn new(isa: Isa) -> PositionKernels {
        match isa.kind() {
            Kind::Portable => {
                PositionKernels { rows: 4, lanes: LANES, run: &[portable::<1>, portable::<2>, portable::<3>] }
            }
            #[cfg(target_arch = "x86_64")]
            // One more vector with fewer rows would need every register, and one sum would be spilled to memory.
            Kind::Avx2 => PositionKernels { rows: 6, lanes: 8, run: &[x86::avx2::<1>, x86::avx2::<2>] },
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => PositionKernels {
                rows: 8,
                lanes: 16,
                run: &[x86::avx512::<1>, x86::avx512::<2>, x86::avx512::<3>],
            },
        }
    }
}

/// Micro-kernels that multiply the weights of a few vectors of channels with a few neighbouring positions, and hold the
/// sums in registers.
#[derive(Clone, Copy)]
pub(super) struct ChannelKernels {
    /// Number of channels of the result: lanes of all vectors.
    pub(super) channels: usize,
    /// Functions for 1, 2, ... positions.
    pub(super) run: &'static [ChannelKernel],
}

/// Arguments, in this order:
/// - number of terms of a sum;
/// - for each term its offset;
/// - for each term the weights of all channels;
/// - address of the first position at offset zero, with the next positions adjacent;
/// - the result, with adjacent channels, and its step from position to position;
/// - true to add to the result.
///
/// A sum is computed in order, and then added.
///
/// # Safety
/// The elements are valid for reads, and the elements of the result for writes. The machine has the instruction-set
/// level.
pub(super) type ChannelKernel = unsafe fn(usize, *const u32, *const f32, *const f32, *mut f32, usize, bool);

/// Minimum number of positions that hides the latency of additions. Fewer positions take as long as this number.
pub(super) const LATENCY_POSITIONS: usize = 4;

/// One function for each number of positions.
macro_rules! neighbours {
    ($name:ident, $vectors:literal, $($positions:literal)+) => {
        &[$($name::<$positions, $vectors>),+]
    };
}

impl ChannelKernels {
    /// Returns the micro-kernels for a result of `channels` channels.
    pub(super) fn new(isa: Isa, channels: usize) -> ChannelKernels {
        let tiles = |lanes: usize, [one, two]: [&'static [ChannelKernel]; 2]| match channels <= lanes {
            true => ChannelKernels { channels: lanes, run: one },
            false => ChannelKernels { channels: 2 * lanes, run: two },
        };
        match isa.kind() {
            Kind::Portable => tiles(
                LANES,
                [neighbours!(portable_channels, 1, 1 2 3 4), neighbours!(portable_channels, 2, 1 2 3 4)],
            ),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => tiles(
                8,
                [neighbours!(avx2_channels, 1, 1 2 3 4 5 6), neighbours!(avx2_channels, 2, 1 2 3 4 5 6)],
            ),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => tiles(
                16,
                [
                    neighbours!(avx512_channels, 1, 1 2 3 4 5 6 7 8),
                    neighbours!(avx512_channels, 2, 1 2 3 4 5 6 7 8),
                ],
            ),
        }
    }
}

/// Number of elements of a vector of the portable kernel.
const LANES: usize = 8;

/// # Safety
/// The contract of [`ChannelKernel`].
unsafe fn portable_channels<const P: usize, const V: usize>(
    count: usize,
    offsets: *const u32,
    weights: *const f32,
    from: *const f32,
    to: *mut f32,
    step: usize,
    add: bool,
) {
    // SAFETY: the caller's contract.
    unsafe {
        let mut sums = [[[0f32; LANES]; V]; P];
        for k in 0..count {
            let from = from.add(offsets.add(k).read() as usize);
            let line = weights.cast::<[[f32; LANES]; V]>().add(k).read_unaligned();
            for (i, sums) in sums.iter_mut().enumerate() {
                let window_values = from.add(i).read_unaligned();
                for (sums, line) in sums.iter_mut().zip(&line) {
                    for (sum, weight) in sums.iter_mut().zip(line) {
                        *sum += window_values * weight;
                    }
                }
            }
        }
        for (i, sums) in sums.into_iter().enumerate() {
            let to = to.add(i * step).cast::<[[f32; LANES]; V]>();
            let before = if add { to.read_unaligned() } else { [[0.0; LANES]; V] };
            to.write_unaligned(std::array::from_fn(|v| {
                std::array::from_fn(|l| if add { before[v][l] + sums[v][l] } else { sums[v][l] })
            }));
        }
    }
}

/// # Safety
/// The contract of [`Run`].
unsafe fn portable<const V: usize>(
    count: usize,
    offsets: *const u32,
    weights: *const f32,
    from: *const *const f32,
    to_offsets: *const usize,
    to: *mut f32,
    step: usize,
    add: bool,
) {
    const ROWS: usize = 4;
    // SAFETY: the caller's contract.
    unsafe {
        let mut sums = [[[0f32; LANES]; V]; ROWS];
        for k in 0..count {
            let offset = offsets.add(k).read() as usize;
            let line: [[f32; LANES]; V] =
                std::array::from_fn(|v| (*from.add(v)).add(offset).cast::<[f32; LANES]>().read_unaligned());
            for (row, sums) in sums.iter_mut().enumerate() {
                let weight = weights.add(k * ROWS + row).read();
                for (sums, line) in sums.iter_mut().zip(&line) {
                    for (sum, window_values) in sums.iter_mut().zip(line) {
                        *sum += weight * window_values;
                    }
                }
            }
        }
        for (row, sums) in sums.into_iter().enumerate() {
            let to: [*mut [f32; LANES]; V] =
                std::array::from_fn(|v| to.add(row * step + *to_offsets.add(v)).cast());
            let before = to.map(|to| if add { to.read_unaligned() } else { [0.0; LANES] });
            for ((to, before), sums) in to.into_iter().zip(before).zip(sums) {
                to.write_unaligned(std::array::from_fn(|i| if add { before[i] + sums[i] } else { sums[i] }));
            }
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    macro_rules! tile {
        (
            $name:ident, $channels:ident, $features:literal, $rows:literal, $lanes:literal,
            $zero:ident, $load:ident, $store:ident, $set:ident, $add:ident, $fma:ident
        ) => {
            /// # Safety
            /// The contract of [`super::Run`].
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $name<const V: usize>(
                count: usize,
                offsets: *const u32,
                mut weights: *const f32,
                from: *const *const f32,
                to_offsets: *const usize,
                to: *mut f32,
                step: usize,
                add: bool,
            ) {
                // SAFETY: the caller's contract.
                unsafe {
                    let from: [*const f32; V] = std::array::from_fn(|v| from.add(v).read());
                    let mut sums = [[$zero(); V]; $rows];
                    for k in 0..count {
                        let offset = offsets.add(k).read() as usize;
                        let mut line = [$zero(); V];
                        for (line, from) in line.iter_mut().zip(from) {
                            *line = $load(from.add(offset));
                        }
                        for (row, sums) in sums.iter_mut().enumerate() {
                            let weight = $set(weights.add(row).read());
                            for (sum, &window_values) in sums.iter_mut().zip(&line) {
                                *sum = $fma(weight, window_values, *sum);
                            }
                        }
                        weights = weights.add($rows);
                    }
                    for (row, sums) in sums.into_iter().enumerate() {
                        let to: [*mut f32; V] =
                            std::array::from_fn(|v| to.add(row * step + *to_offsets.add(v)));
                        let before = if add { to.map(|to| $load(to)) } else { [$zero(); V] };
                        for ((to, before), sum) in to.into_iter().zip(before).zip(sums) {
                            $store(to, if add { $add(before, sum) } else { sum });
                        }
                    }
                }
            }

            /// # Safety
            /// The contract of [`super::ChannelKernel`].
            #[target_feature(enable = $features)]
            pub(super) unsafe fn $channels<const P: usize, const V: usize>(
                count: usize,
                offsets: *const u32,
                mut weights: *const f32,
                from: *const f32,
                to: *mut f32,
                step: usize,
                add: bool,
            ) {
                // SAFETY: the caller's contract.
                unsafe {
                    let mut sums = [[$zero(); V]; P];
                    for k in 0..count {
                        let from = from.add(offsets.add(k).read() as usize);
                        let mut line = [$zero(); V];
                        for (v, line) in line.iter_mut().enumerate() {
                            *line = $load(weights.add(v * $lanes));
                        }
                        for (i, sums) in sums.iter_mut().enumerate() {
                            let window_values = $set(from.add(i).read_unaligned());
                            for (sum, &weight) in sums.iter_mut().zip(&line) {
                                *sum = $fma(window_values, weight, *sum);
                            }
                        }
                        weights = weights.add(V * $lanes);
                    }
                    for (i, sums) in sums.into_iter().enumerate() {
                        for (v, sum) in sums.into_iter().enumerate() {
                            let to = to.add(i * step + v * $lanes);
                            $store(to, if add { $add($load(to), sum) } else { sum });
                        }
                    }
                }
            }
        };
    }

    tile!(
        avx2,
        avx2_channels,
        "avx2,fma",
        6,
        8,
        _mm256_setzero_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        _mm256_set1_ps,
        _mm256_add_ps,
        _mm256_fmadd_ps
    );
    tile!(
        avx512,
        avx512_channels,
        "avx512f",
        8,
        16,
        _mm512_setzero_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        _mm512_set1_ps,
        _mm512_add_ps,
        _mm512_fmadd_ps
    );
}
