// What the three libraries share: settings, the log of calls, and failures on request.
//
// Environment variables, read when a library is loaded; software_cuda_set changes the first three later:
//   SOFTWARE_CUDA_FAIL      FUNCTION:N=CODE, several with commas: the N-th call from now on returns CODE
//   SOFTWARE_CUDA_LANES     "falling": lanes run in falling order
//   SOFTWARE_CUDA_LOG       "1": calls are recorded, software_cuda_log returns them
//   SOFTWARE_CUDA_MEMORY    bytes of the device
//   SOFTWARE_CUDA_DEVICES   number of devices
//   SOFTWARE_CUDA_VERSION   version of the driver, 13000 for 13.0
//   SOFTWARE_NVRTC_VERSION  version of the compiler, in the same form
//   SOFTWARE_NVRTC_DROP_BARRIER  number of the barrier that each kernel loses: a mutant
//   SOFTWARE_NVRTC_CACHE    folder of compiled modules: equal sources compile once
#pragma once
#include <functional>
#include <string>

extern "C" {
// Sets a variable of the list above for this process.
void software_cuda_set(const char* name, const char* value);
// Returns the calls since the last call of this function, one a line.
const char* software_cuda_log();
// Records a call. Returns a code if the call must fail, or else zero.
int software_call_begins(const char* function);
// True while a stream is captured.
bool software_is_capturing();
}
// Appends work to a stream, or to the graph that it captures. Returns a result of the driver.
int software_enqueue(void* stream, std::function<int()> work);
// True if a range of bytes lies in one allocation of a device.
bool software_is_allocated(const void* start, size_t bytes);
std::string software_setting(const char* name, const char* otherwise);

#define BEGIN                                                        \
    if (int code = software_call_begins(__func__)) { return code; }
