//! bfloat16 products by AMX: x86-64 servers since 2023 (Intel).
//!
//! Tiles 0 to 3 contain sums, 4 and 5 A, 6 and 7 B. Each tile has sixteen lines of 64 bytes.

use std::arch::asm;

use crate::gemm::tiles::job::{Job, LINE, LINES};

/// Operand of `ldtilecfg`.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    line_bytes: [u16; 16],
    lines: [u8; 16],
}

static CONFIGURATION: Configuration = {
    let mut configuration =
        Configuration { palette: 1, start_row: 0, reserved: [0; 14], line_bytes: [0; 16], lines: [0; 16] };
    let mut tile = 0;
    while tile < 8 {
        configuration.line_bytes[tile] = LINE as u16;
        configuration.lines[tile] = LINES as u8;
        tile += 1;
    }
    configuration
};

/// Configures the tiles of this thread.
///
/// # Safety
/// The machine has AMX with BF16, and the process has the permission to use it.
pub(super) unsafe fn open() {
    // SAFETY: the caller's contract; 64 bytes are read. Compiled code never uses tiles.
    unsafe {
        asm!(
            "ldtilecfg [{}]",
            in(reg) &raw const CONFIGURATION,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, preserves_flags, readonly),
        );
    }
}

/// Releases the tiles of this thread.
///
/// # Safety
/// As [`open`].
pub(super) unsafe fn close() {
    // SAFETY: the caller's contract.
    unsafe {
        asm!(
            "tilerelease",
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, preserves_flags, nomem),
        );
    }
}

/// Multiply-adds of a round of [`multiply_add`].
pub(crate) const BURST: usize = 4 * LINES * LINES * LINE / 2;

/// Runs `rounds` rounds of products of zero tiles. Four sums are more than the latency of a product times the rate.
///
/// # Safety
/// As [`open`].
pub(crate) unsafe fn multiply_add(rounds: usize) {
    // SAFETY: the caller's contract; the code uses registers only. There is at least one round.
    unsafe {
        open();
        asm!(
            "2:",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "dec {}",
            "jnz 2b",
            inout(reg) rounds.max(1) => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, nomem),
        );
        close();
    }
}

/// Constants of the loops in memory.
#[repr(C)]
struct Loops {
    /// Pairs of offsets (A, B), and their number.
    products: *const [usize; 2],
    count: usize,
    /// Bytes from panel to panel, and from chunk to chunk, of A and of B.
    panels: [usize; 2],
    steps: [usize; 2],
}

/// Defines the sums of a number of tiles: sets them to zero, runs `$step` for each chunk and each product from
/// addresses `x` and `y` on, and stores them. `x` is then the address of the second line of tiles.
macro_rules! sums {
    ($name:ident, [$($zero:literal)*], [$($step:literal)*], [$($store:literal)*]) => {
        /// # Safety
        /// The contract of [`Job::run`], and tiles are configured.
        unsafe fn $name(job: &Job<'_>, loops: &Loops) {
            // SAFETY: the caller's contract; the code loads and stores tiles of the job only. There is at least one
            // chunk and one product.
            unsafe {
                asm!(
                    $($zero,)*
                    "2:",
                    "mov {p}, [{loops}]",
                    "mov {n}, [{loops} + 8]",
                    "3:",
                    "mov {x}, [{p}]",
                    "mov {y}, [{p} + 8]",
                    "add {x}, {a}",
                    "add {y}, {b}",
                    $($step,)*
                    "add {p}, 16",
                    "dec {n}",
                    "jnz 3b",
                    "add {a}, [{loops} + 32]",
                    "add {b}, [{loops} + 40]",
                    "dec {chunks}",
                    "jnz 2b",
                    "mov {x}, {row}",
                    "shl {x}, 4",
                    "add {x}, {to}",
                    $($store,)*
                    loops = in(reg) loops,
                    a = inout(reg) job.a => _,
                    b = inout(reg) job.b => _,
                    chunks = inout(reg) job.chunks => _,
                    line = in(reg) LINE,
                    to = in(reg) job.to,
                    row = in(reg) job.to_row * size_of::<f32>() as isize,
                    p = out(reg) _,
                    n = out(reg) _,
                    x = out(reg) _,
                    y = out(reg) _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack),
                );
            }
        }
    };
}

sums!(
    two_by_two,
    ["tilezero tmm0" "tilezero tmm1" "tilezero tmm2" "tilezero tmm3"],
    [
        "tileloadd tmm4, [{x} + {line}*1]"
        "tileloadd tmm6, [{y} + {line}*1]"
        "add {x}, [{loops} + 16]"
        "add {y}, [{loops} + 24]"
        "tdpbf16ps tmm0, tmm4, tmm6"
        "tileloadd tmm7, [{y} + {line}*1]"
        "tdpbf16ps tmm1, tmm4, tmm7"
        "tileloadd tmm5, [{x} + {line}*1]"
        "tdpbf16ps tmm2, tmm5, tmm6"
        "tdpbf16ps tmm3, tmm5, tmm7"
    ],
    [
        "tilestored [{to} + {row}*1], tmm0"
        "tilestored [{to} + {row}*1 + 64], tmm1"
        "tilestored [{x} + {row}*1], tmm2"
        "tilestored [{x} + {row}*1 + 64], tmm3"
    ]
);

sums!(
    two_by_one,
    ["tilezero tmm0" "tilezero tmm2"],
    [
        "tileloadd tmm4, [{x} + {line}*1]"
        "tileloadd tmm6, [{y} + {line}*1]"
        "add {x}, [{loops} + 16]"
        "tdpbf16ps tmm0, tmm4, tmm6"
        "tileloadd tmm5, [{x} + {line}*1]"
        "tdpbf16ps tmm2, tmm5, tmm6"
    ],
    ["tilestored [{to} + {row}*1], tmm0" "tilestored [{x} + {row}*1], tmm2"]
);

sums!(
    one_by_two,
    ["tilezero tmm0" "tilezero tmm1"],
    [
        "tileloadd tmm4, [{x} + {line}*1]"
        "tileloadd tmm6, [{y} + {line}*1]"
        "add {y}, [{loops} + 24]"
        "tdpbf16ps tmm0, tmm4, tmm6"
        "tileloadd tmm7, [{y} + {line}*1]"
        "tdpbf16ps tmm1, tmm4, tmm7"
    ],
    ["tilestored [{to} + {row}*1], tmm0" "tilestored [{to} + {row}*1 + 64], tmm1"]
);

sums!(
    one_by_one,
    ["tilezero tmm0"],
    [
        "tileloadd tmm4, [{x} + {line}*1]"
        "tileloadd tmm6, [{y} + {line}*1]"
        "tdpbf16ps tmm0, tmm4, tmm6"
    ],
    ["tilestored [{to} + {row}*1], tmm0"]
);

/// # Safety
/// The contract of [`Job::run`]: the machine has AMX with BF16, and tiles are configured.
pub(super) unsafe fn sums(job: Job<'_>) {
    let Job { products, panels, steps, .. } = job;
    debug_assert!(job.chunks > 0 && !products.is_empty());
    let loops = Loops { products: products.as_ptr(), count: products.len(), panels, steps };
    // SAFETY: the caller's contract.
    unsafe {
        match job.num_tiles() {
            (2, 2) => two_by_two(&job, &loops),
            (2, _) => two_by_one(&job, &loops),
            (_, 2) => one_by_two(&job, &loops),
            _ => one_by_one(&job, &loops),
        }
    }
}
