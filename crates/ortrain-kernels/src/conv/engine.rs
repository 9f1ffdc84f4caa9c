//! Engine: one way to compute a convolution.

use ortrain_expr::{DType, OutOfRange};

use super::epilogue::Epilogue;
use super::padding_fixup::RunSettings;
use crate::conv::desc::ConvDesc;
use crate::gemm::levels::Real;
use crate::gemm::micro::Micro;
use crate::isa::Isa;
use crate::pool::Pool;
use crate::scratch::Scratch;

/// An algorithm for convolutions.
pub(super) trait Engine: Send + Sync {
    /// Returns the name of the algorithm.
    fn name(&self) -> &'static str;
    fn epilogue(&self) -> &Epilogue;
    /// Bytes of scratch memory: shared by all workers, and for each worker.
    fn scratch(&self) -> (usize, usize);
    /// # Safety
    /// The contract of [`super::ConvKernel::run`].
    unsafe fn run(
        &self,
        bases: &[*mut u8],
        settings: RunSettings,
        pool: &Pool,
        scratch: Scratch,
    ) -> Result<(), OutOfRange>;
}

/// Returns the micro-kernel for the products of a group. `dtypes`: first the operand of the rows, then the other
/// operand.
pub(super) fn choose_micro_kernel<T: Real>(desc: &ConvDesc, isa: Isa, dtypes: [DType; 2]) -> Micro<T> {
    Micro::select(isa, desc.products, dtypes)
}
