//! Failures of NVIDIA's libraries.

use cudarc::cublaslt::result::CublasError;
use cudarc::driver::DriverError;

use crate::driver;

/// Failed call of a library.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Failure {
    /// The driver failed.
    Driver(DriverError),
    /// The library for products failed.
    Products(CublasError),
}

impl Failure {
    /// Returns the name and the description of the failure.
    pub(crate) fn describe(self) -> String {
        match self {
            Failure::Driver(error) => driver::describe(error),
            Failure::Products(CublasError(status)) => format!("{status:?}"),
        }
    }
}

impl From<DriverError> for Failure {
    fn from(error: DriverError) -> Failure {
        Failure::Driver(error)
    }
}

impl From<CublasError> for Failure {
    fn from(error: CublasError) -> Failure {
        Failure::Products(error)
    }
}
