//! Settings of a backend, which its kernels depend on.

use ortrain_kernels::{Bf16Unit, Isa, KernelFilter, TileMode, UnknownSetting};

/// Settings of a backend.
#[derive(Clone, Debug)]
pub(crate) struct Settings {
    pub(crate) isa: Isa,
    pub(crate) mode: TileMode,
    pub(crate) kernels: KernelFilter,
    /// Unit for bfloat16 products, if a bfloat16 precision is selected.
    pub(crate) bf16_unit: Option<Bf16Unit>,
}

impl Settings {
    /// Returns the settings of the environment.
    pub(crate) fn detect() -> Result<Settings, UnknownSetting> {
        let (isa, mode, kernels) = (Isa::detect()?, TileMode::detect()?, KernelFilter::detect()?);
        Ok(Settings { isa, mode, kernels, bf16_unit: None })
    }

    /// Returns settings that are independent of the environment.
    pub(crate) fn with_isa(isa: Isa) -> Settings {
        let (mode, kernels) = (TileMode::MachineCode, KernelFilter::default());
        Settings { isa, mode, kernels, bf16_unit: None }
    }
}
