//! Pages of memory that is about to be written.

use ortrain_kernels::Pool;
use ortrain_program::HostMemory;

/// Bytes of a large page: the part that a thread touches at a time.
const TOUCH_BYTES: usize = 2 << 20;

/// Makes the system map every page of memory that will be written, on all threads; see [`HostMemory::touch`]. Later
/// calls for the same memory do nothing.
pub fn prefault(memory: &HostMemory) {
    if memory.prefault() {
        let bytes = memory.len();
        let touch = |piece: usize, _| memory.touch(piece * TOUCH_BYTES..bytes.min((piece + 1) * TOUCH_BYTES));
        Pool::global().run(bytes.div_ceil(TOUCH_BYTES), usize::MAX, &touch);
    }
}
