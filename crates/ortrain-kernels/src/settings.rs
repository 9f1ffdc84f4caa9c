//! Environment variables that select the code of kernels: the instruction-set level, machine code, and kernels.

use std::fmt;
use std::sync::OnceLock;

use crate::isa::Isa;

/// Environment variable that caps the instruction-set level.
const ISA: &str = "ORTRAIN_ISA";
/// Environment variable that turns machine code off.
const JIT: &str = "ORTRAIN_JIT";

/// Returns the value of an environment variable, if it is neither unset nor empty.
pub(crate) fn value_of(variable: &str) -> Option<String> {
    let value = std::env::var_os(variable)?.to_string_lossy().into_owned();
    (!value.is_empty()).then_some(value)
}

impl Isa {
    /// Returns the best level of this machine, capped by the environment variable `ORTRAIN_ISA` (one of
    /// [`Isa::NAMES`]). A level that the machine does not have, or an empty value, has no effect. Decided once per
    /// process.
    ///
    /// # Errors
    /// Returns an error if the variable has another value.
    pub fn detect() -> Result<Isa, UnknownSetting> {
        static BEST: OnceLock<Result<Isa, UnknownSetting>> = OnceLock::new();
        let best = BEST.get_or_init(|| match value_of(ISA) {
            None => Ok(Isa::best()),
            Some(cap) => Isa::capped(&cap).ok_or(UnknownSetting::Isa(cap)),
        });
        best.clone()
    }
}

/// Execution of groups of element-wise operations. Both modes compute the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TileMode {
    /// As machine code, where the machine and the system permit it and the group is suitable; interpreted elsewhere.
    MachineCode,
    /// Interpreted, one operation at a time.
    Interpreter,
}

impl TileMode {
    /// Returns [`Interpreter`](TileMode::Interpreter) if the environment variable `ORTRAIN_JIT` is `off`, and
    /// [`MachineCode`](TileMode::MachineCode) if it is `on`, empty or not set. Decided once per process.
    ///
    /// # Errors
    /// Returns an error if the variable has another value.
    pub fn detect() -> Result<TileMode, UnknownSetting> {
        static MODE: OnceLock<Result<TileMode, UnknownSetting>> = OnceLock::new();
        MODE.get_or_init(|| TileMode::of(value_of(JIT).as_deref())).clone()
    }

    fn of(value: Option<&str>) -> Result<TileMode, UnknownSetting> {
        match value {
            None | Some("on") => Ok(TileMode::MachineCode),
            Some("off") => Ok(TileMode::Interpreter),
            Some(other) => Err(UnknownSetting::Jit(other.to_owned())),
        }
    }
}

/// Error: the value of an environment variable is not one of its values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum UnknownSetting {
    /// `ORTRAIN_ISA` has this value.
    Isa(String),
    /// `ORTRAIN_JIT` has this value.
    Jit(String),
    /// `ORTRAIN_KERNELS` has this entry.
    Kernels {
        /// The entry, with its sign.
        entry: String,
        /// Names of all kernels.
        known: String,
    },
}

impl fmt::Display for UnknownSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UnknownSetting::Isa(value) => {
                let [lowest, middle, best] = Isa::NAMES;
                write!(
                    f,
                    "the environment variable {ISA} is {value:?}, which is not an instruction-set level; set it to \
                     {lowest:?}, {middle:?} or {best:?}, or unset it to use the best level of the machine"
                )
            }
            UnknownSetting::Jit(value) => write!(
                f,
                "the environment variable {JIT} is {value:?}; set it to \"off\" to interpret element-wise operations, \
                 or to \"on\" or unset it to run them as machine code"
            ),
            UnknownSetting::Kernels { entry, known } => write!(
                f,
                "the environment variable ORTRAIN_KERNELS has the unknown entry {entry:?}; entries are names of \
                 kernels, after a - to exclude the kernel, or after a + to use it wherever it supports the sizes: \
                 {known}"
            ),
        }
    }
}

impl std::error::Error for UnknownSetting {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_list_values() {
        let [isa, jit] = [UnknownSetting::Isa("sse2".into()), UnknownSetting::Jit("no".into())];
        assert_eq!(
            isa.to_string(),
            "the environment variable ORTRAIN_ISA is \"sse2\", which is not an instruction-set level; set it to \
             \"portable\", \"avx2\" or \"avx512\", or unset it to use the best level of the machine"
        );
        assert_eq!(
            jit.to_string(),
            "the environment variable ORTRAIN_JIT is \"no\"; set it to \"off\" to interpret element-wise operations, \
             or to \"on\" or unset it to run them as machine code"
        );
    }

    #[test]
    fn machine_code_is_on_or_off() {
        let of = |value: &str| TileMode::of(Some(value));
        assert_eq!(TileMode::of(None), Ok(TileMode::MachineCode));
        assert_eq!(of("on"), Ok(TileMode::MachineCode));
        assert_eq!(of("off"), Ok(TileMode::Interpreter));
        assert_eq!(of("OFF"), Err(UnknownSetting::Jit("OFF".to_owned())));
    }
}
