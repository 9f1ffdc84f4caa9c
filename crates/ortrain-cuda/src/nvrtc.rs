//! NVIDIA's compiler NVRTC.

use std::ffi::{CStr, CString};

use cudarc::nvrtc::{result, sys};

use crate::libraries::{MissingLibrary, Nvidia, open};

/// Failed compilation.
#[derive(Clone, Debug)]
pub(crate) enum CompileError {
    /// NVRTC is missing.
    Missing(MissingLibrary),
    /// NVRTC refuses the source or its options, with this message.
    Refused(String),
}

/// Returns the version of NVRTC: 13.0 is `(13, 0)`.
pub(crate) fn version() -> Result<(i32, i32), CompileError> {
    open(Nvidia::Nvrtc).map_err(CompileError::Missing)?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: NVRTC has the function, and both pointers are valid for a write.
    unsafe { sys::nvrtcVersion(&raw mut major, &raw mut minor) }
        .result()
        .map_err(|error| refused(error, ""))?;
    Ok((major, minor))
}

fn refused(error: result::NvrtcError, log: &str) -> CompileError {
    // SAFETY: the function returns a constant text for every code.
    let name = unsafe { CStr::from_ptr(sys::nvrtcGetErrorString(error.0)) };
    let name = name.to_string_lossy();
    CompileError::Refused(if log.is_empty() { name.into_owned() } else { format!("{name}: {log}") })
}

/// Source under compilation.
struct Source(sys::nvrtcProgram);

impl Drop for Source {
    fn drop(&mut self) {
        // SAFETY: the program was created, and is not used again.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

/// Compiled source.
pub(crate) struct Compiled {
    /// Machine code for a device.
    pub(crate) image: Vec<u8>,
    /// Messages of the compiler.
    pub(crate) log: String,
}

/// Compiles a source for an architecture, for example `sm_90`, with further options.
pub(crate) fn compile(source: &str, architecture: &str, options: &[&str]) -> Result<Compiled, CompileError> {
    open(Nvidia::Nvrtc).map_err(CompileError::Missing)?;
    let text =
        CString::new(source).map_err(|_| CompileError::Refused("the source has a zero byte".to_owned()))?;
    let program = Source(result::create_program(&text, None).map_err(|error| refused(error, ""))?);
    let architecture = format!("--gpu-architecture={architecture}");
    let options: Vec<&str> = [architecture.as_str()].into_iter().chain(options.iter().copied()).collect();
    // SAFETY: the program was created.
    let compiled = unsafe { result::compile_program(program.0, &options) };
    // SAFETY: as above.
    let log = unsafe { result::get_program_log(program.0) }.unwrap_or_default();
    let log: Vec<u8> = log.into_iter().map(|byte| byte as u8).take_while(|&byte| byte != 0).collect();
    let log = String::from_utf8_lossy(&log).trim().to_owned();
    compiled.map_err(|error| refused(error, &log))?;
    let mut bytes = 0;
    // SAFETY: the program is compiled, and the pointer is valid for a write.
    unsafe { sys::nvrtcGetCUBINSize(program.0, &raw mut bytes) }
        .result()
        .map_err(|error| refused(error, ""))?;
    let mut image = vec![0u8; bytes];
    // SAFETY: the program is compiled, and the buffer has the size of its image.
    unsafe { sys::nvrtcGetCUBIN(program.0, image.as_mut_ptr().cast()) }
        .result()
        .map_err(|error| refused(error, ""))?;
    Ok(Compiled { image, log })
}
