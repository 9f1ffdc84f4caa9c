//! Panels of bytes, and products of two panels by two.

pub(crate) use crate::gemm::corner_copy::{LINES, SIDE};

/// Depths of a tile.
pub(crate) const DEPTHS: usize = 64;
/// Panels that are packed together from wide rows.
pub(super) const WIDE_PANELS: usize = 4;
/// Bytes of a tile, and of each of its rows.
pub(super) const TILE: usize = 1024;
pub(super) const ROW: usize = 64;
/// Quads of depths of a row of a tile of A, and rows of a tile of B.
pub(super) const QUADS: usize = ROW / 4;

/// Numbers behind the tiles of a panel, for each line.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct PanelFooter {
    /// Zero point of the shifted bytes.
    pub(crate) zero_points: [i32; LINES],
    /// Sum of the shifted bytes; for B, without the zero point of each.
    pub(crate) sums: [i32; LINES],
}

impl PanelFooter {
    /// Writes the footer of a panel.
    ///
    /// # Safety
    /// `panel` has the capacity of a panel of this depth.
    pub(crate) unsafe fn write(self, panel: *mut u8, depth: usize) {
        // SAFETY: the footer lies behind the tiles.
        unsafe { panel.add(depth.div_ceil(DEPTHS) * TILE).cast::<PanelFooter>().write_unaligned(self) };
    }
}

/// Returns the bytes of a packed panel. Each tile reserves the bytes of a footer, so that the panels of a sum in several
/// chunks need the bytes of a panel of the whole depth.
pub(crate) const fn panel_bytes(depth: usize) -> usize {
    depth.div_ceil(DEPTHS) * (TILE + size_of::<PanelFooter>())
}

/// Products of at most two panels of A and two panels of B.
#[derive(Clone, Copy)]
pub(super) struct Job {
    /// Number of quads of depths.
    pub(super) quads: usize,
    pub(super) a: *const u8,
    pub(super) b: *const u8,
    /// Bytes from panel to panel.
    pub(super) panel: usize,
    /// Numbers of existing rows and columns.
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Destination. All existing rows are written, whole panels wide; further rows, up to a whole panel, may be written.
    pub(super) to: *mut i32,
    pub(super) to_row: isize,
}

impl Job {
    /// Returns the number of tiles along the depth.
    pub(super) fn chunks(&self) -> usize {
        self.quads.div_ceil(QUADS)
    }

    /// Returns the number of quads of a tile.
    pub(super) fn quads_of(&self, chunk: usize) -> usize {
        QUADS.min(self.quads - chunk * QUADS)
    }

    /// Returns the number of panels along the columns.
    pub(super) fn across(&self) -> usize {
        self.cols.div_ceil(LINES)
    }

    /// Returns the address of a row of A inside its panel, and the footer of the panel.
    pub(super) fn row_of_a(&self, row: usize) -> (*const u8, *const PanelFooter) {
        let panel = self.a.wrapping_add(row / LINES * self.panel);
        (panel.wrapping_add(row % LINES * ROW), panel.wrapping_add(self.chunks() * TILE).cast())
    }

    /// Returns the address of a panel of B, and its footer.
    pub(super) fn panel_of_b(&self, index: usize) -> (*const u8, *const PanelFooter) {
        let panel = self.b.wrapping_add(index * self.panel);
        (panel, panel.wrapping_add(self.chunks() * TILE).cast())
    }
}
