//! Part of the result of a convolution.

/// A rectangle of the result: a range of channels of one image, and a range of positions in the plane of each channel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Rect {
    pub(super) image: usize,
    pub(super) channels: (usize, usize),
    pub(super) positions: (usize, usize),
}
