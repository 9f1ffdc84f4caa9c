//! Micro-kernels of each level: the tables from which products choose.

use ortrain_expr::DType;

use super::arithmetic::Arithmetic;
use super::byte_tiles::{self, ByteProducts};
use super::desc::Products;
use super::micro::{DotKernels, Micro, TileProducts};
use super::{portable, tiles};

#[cfg(target_arch = "x86_64")]
use super::{avx2, avx512};
use crate::isa::{Isa, Kind};

/// Compute type of products.
pub(crate) trait Real: Arithmetic {
    /// Element type.
    const DTYPE: DType;

    /// Returns the micro-kernel of a level.
    fn micro(isa: Isa) -> Micro<Self>;
    /// Returns the dot products, for lines of both operands that are adjacent along k.
    fn dots(isa: Isa) -> Option<DotKernels<Self>>;
}

impl Real for f32 {
    const DTYPE: DType = DType::F32;

    fn micro(isa: Isa) -> Micro<f32> {
        match isa.kind() {
            Kind::Portable => portable::F32,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => avx2::F32,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => avx512::F32,
        }
    }

    fn dots(isa: Isa) -> Option<DotKernels<f32>> {
        match isa.kind() {
            Kind::Portable => None,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => Some(avx2::F32_DOTS),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => Some(avx512::F32_DOTS),
        }
    }
}

impl Real for f64 {
    const DTYPE: DType = DType::F64;

    fn micro(isa: Isa) -> Micro<f64> {
        match isa.kind() {
            Kind::Portable => portable::F64,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => avx2::F64,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => avx512::F64,
        }
    }

    fn dots(isa: Isa) -> Option<DotKernels<f64>> {
        match isa.kind() {
            Kind::Portable => None,
            #[cfg(target_arch = "x86_64")]
            Kind::Avx2 => Some(avx2::F64_DOTS),
            #[cfg(target_arch = "x86_64")]
            Kind::Avx512 => Some(avx512::F64_DOTS),
        }
    }
}

/// Sums of products of bytes.
impl Real for i32 {
    const DTYPE: DType = DType::I32;

    fn micro(isa: Isa) -> Micro<i32> {
        let side = byte_tiles::SIDE;
        let products = ByteProducts::new(isa, [DType::U8, DType::I8]);
        let tiles = Some(TileProducts::Bytes(products));
        Micro { mr: side, nr: side, run: &[], half_width: None, tiles }
    }

    fn dots(_: Isa) -> Option<DotKernels<i32>> {
        None
    }
}

impl<T: Real> Micro<T> {
    /// Selects the micro-kernel for operands of two types.
    pub(crate) fn select(isa: Isa, products: Products, dtypes: [DType; 2]) -> Micro<T> {
        match products.bf16_tiles::<T>(dtypes) {
            Some(tiles) => {
                let (side, tiles) = (tiles::SIDE, Some(TileProducts::Bf16(tiles)));
                Micro { mr: side, nr: side, run: &[], half_width: None, tiles }
            }
            None => {
                let mut micro = T::micro(isa);
                if let Some(TileProducts::Bytes(bytes)) = micro.tiles {
                    micro.tiles = Some(TileProducts::Bytes(bytes.for_types(dtypes)));
                }
                micro
            }
        }
    }
}
