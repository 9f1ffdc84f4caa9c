//! Settings of the software libraries.

use std::ffi::{CStr, CString, c_char};

use libloading::Library;

/// Order of the lanes of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lanes {
    Rising,
    Falling,
}

/// Returns the open driver.
fn driver() -> Library {
    // SAFETY: the library is open already, and has no initialization that could run again.
    unsafe { Library::new("libcuda.so") }.expect("the software driver is open")
}

/// Sets a variable of the software libraries: see `driver/software.h`.
pub(crate) fn set(name: &str, value: &str) {
    let [name, value] = [name, value].map(|text| CString::new(text).expect("there is no zero byte"));
    let driver = driver();
    // SAFETY: the function has this type, and both texts end with a zero byte.
    unsafe {
        let set = driver.get::<unsafe extern "C" fn(*const c_char, *const c_char)>(b"software_cuda_set");
        set.expect("it is the software driver")(name.as_ptr(), value.as_ptr());
    }
}

/// Sets the order of lanes.
pub(crate) fn set_lanes(lanes: Lanes) {
    set("SOFTWARE_CUDA_LANES", if lanes == Lanes::Falling { "falling" } else { "rising" });
}

/// Returns the calls of the driver since the last call of this function. The first call starts the recording.
pub(crate) fn calls() -> Vec<String> {
    set("SOFTWARE_CUDA_LOG", "1");
    let driver = driver();
    // SAFETY: the function has this type, and returns a text that is valid until the next call.
    let text = unsafe {
        let log = driver.get::<unsafe extern "C" fn() -> *const c_char>(b"software_cuda_log");
        CStr::from_ptr(log.expect("it is the software driver")())
    };
    text.to_string_lossy().lines().map(str::to_owned).collect()
}
