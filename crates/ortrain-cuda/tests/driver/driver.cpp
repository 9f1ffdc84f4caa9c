// The driver of CUDA as a library that computes on the processor.
//
// Work of a stream runs when somebody waits for it: a host that reads too early, or reuses its memory too early, gets
// wrong bytes. Copies from ordinary memory take the bytes at the call, copies from pinned memory take them when they run.
#include <dlfcn.h>
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <vector>
#include "lanes.h"
#include "software.h"

enum Result {
    SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, ILLEGAL_ADDRESS = 700,
    LAUNCH_FAILED = 719, CAPTURE_UNSUPPORTED = 900, CAPTURE_INVALIDATED = 901,
};
typedef unsigned long long Address;
typedef std::function<int()> Work;

// One call at a time: the driver is no subject of the tests of threads.
static std::recursive_mutex lock;
#define LOCKED std::lock_guard<std::recursive_mutex> guard(lock);

// Settings, log and failures.

static std::map<std::string, std::string>& settings() {
    static std::map<std::string, std::string> values;
    return values;
}

std::string software_setting(const char* name, const char* otherwise) {
    LOCKED
    auto found = settings().find(name);
    if (found != settings().end()) { return found->second; }
    const char* value = getenv(name);
    return settings()[name] = value ? value : otherwise;
}

struct Failure { std::string function; long calls; int code; };
static std::vector<Failure> failures;
static std::string calls_so_far, calls_returned;
static bool is_logging;

static void read_failures(std::string text) {
    failures.clear();
    for (size_t at = 0; at < text.size();) {
        size_t end = std::min(text.find(',', at), text.size());
        char name[128];
        long calls;
        int code;
        if (sscanf(text.substr(at, end - at).c_str(), "%127[^:]:%ld=%d", name, &calls, &code) == 3) {
            failures.push_back({name, calls, code});
        }
        at = end + 1;
    }
}

// Reads the environment, at the first call.
static void start() {
    static bool is_started = false;
    if (is_started) { return; }
    is_started = true;
    read_failures(software_setting("SOFTWARE_CUDA_FAIL", ""));
    is_logging = software_setting("SOFTWARE_CUDA_LOG", "") == "1";
}

extern "C" void software_cuda_set(const char* name, const char* value) {
    LOCKED
    start();
    settings()[name] = value;
    if (!strcmp(name, "SOFTWARE_CUDA_FAIL")) { read_failures(value); }
    if (!strcmp(name, "SOFTWARE_CUDA_LOG")) { is_logging = !strcmp(value, "1"); }
}

extern "C" const char* software_cuda_log() {
    LOCKED
    calls_returned.swap(calls_so_far);
    calls_so_far.clear();
    return calls_returned.c_str();
}

extern "C" int software_call_begins(const char* function) {
    LOCKED
    start();
    if (is_logging) { calls_so_far += function + std::string("\n"); }
    for (Failure& failure : failures) {
        if (failure.function == function && --failure.calls == 0) { return failure.code; }
    }
    return 0;
}

// Memory.

static std::map<Address, size_t> device_memory, pinned_memory;
static size_t allocated;
static size_t device_bytes() { return strtoull(software_setting("SOFTWARE_CUDA_MEMORY", "8589934592").c_str(), nullptr, 10); }

static bool is_inside(const std::map<Address, size_t>& memory, Address start, size_t bytes) {
    auto after = memory.upper_bound(start);
    if (after == memory.begin()) { return false; }
    auto [first, size] = *--after;
    return start - first <= size && bytes <= size - (start - first);
}

bool software_is_allocated(const void* start, size_t bytes) {
    LOCKED
    return is_inside(device_memory, (Address)start, bytes);
}

// Streams, events and graphs.

struct Stream {
    std::deque<Work> waiting;
    // Nodes of the graph that is being captured.
    std::unique_ptr<std::vector<Work>> captured;
    bool is_invalid = false;
};
struct Event {
    std::shared_ptr<bool> is_done = std::make_shared<bool>(true);
    std::shared_ptr<double> time = std::make_shared<double>(0.0);
    Stream* stream = nullptr;
};
struct Graph { std::vector<Work> nodes; };
struct Module { void* library; std::vector<std::unique_ptr<Kernel>> kernels; };

static std::map<Stream*, std::unique_ptr<Stream>> streams;
static Stream null_stream;
// First error of work that ran later than its call. It stays.
static int late_error;
static bool is_initialized;
static int retained;
static thread_local void* current_context;

// The handles 0, 1 and 2 are default streams.
static bool is_default(void* handle) { return (uintptr_t)handle <= 2; }
static Stream* stream_of(void* handle) { return is_default(handle) ? &null_stream : (Stream*)handle; }
static bool is_stream(void* handle) { return is_default(handle) || streams.count((Stream*)handle); }

static int drain(Stream* stream, const bool* until = nullptr) {
    while (!stream->waiting.empty() && !(until && *until)) {
        Work work = std::move(stream->waiting.front());
        stream->waiting.pop_front();
        if (int code = late_error ? 0 : work()) { late_error = code; }
    }
    return late_error;
}

static int drain_all() {
    drain(&null_stream);
    for (auto& [stream, _] : streams) { drain(stream); }
    return late_error;
}

extern "C" bool software_is_capturing() {
    LOCKED
    for (auto& [stream, _] : streams) {
        if (stream->captured) { return true; }
    }
    return false;
}

int software_enqueue(void* handle, Work work) {
    LOCKED
    if (!current_context) { return INVALID_CONTEXT; }
    if (!is_stream(handle)) { return INVALID_HANDLE; }
    if (late_error) { return late_error; }
    Stream* stream = stream_of(handle);
    if (stream->captured) {
        stream->captured->push_back(std::move(work));
        return SUCCESS;
    }
    stream->waiting.push_back(std::move(work));
    return is_default(handle) ? drain(stream) : SUCCESS;
}

static int refuse_in_capture(Stream* stream) {
    if (!stream->captured) { return SUCCESS; }
    stream->is_invalid = true;
    return CAPTURE_UNSUPPORTED;
}

static double now() {
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

#define READY                                             \
    LOCKED                                                \
    BEGIN                                                 \
    if (!is_initialized) { return NOT_INITIALIZED; }
#define IN_CONTEXT                                        \
    READY                                                 \
    if (!current_context) { return INVALID_CONTEXT; }     \
    if (late_error) { return late_error; }

extern "C" {

int cuInit(unsigned) {
    LOCKED
    BEGIN
    is_initialized = true;
    return SUCCESS;
}

int cuDriverGetVersion(int* version) {
    LOCKED
    BEGIN
    *version = atoi(software_setting("SOFTWARE_CUDA_VERSION", "13000").c_str());
    return SUCCESS;
}

int cuGetErrorName(int code, const char** name) {
    BEGIN
    switch (code) {
        case OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
        case ILLEGAL_ADDRESS: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
        case LAUNCH_FAILED: *name = "CUDA_ERROR_LAUNCH_FAILED"; break;
        default: *name = "CUDA_ERROR_OF_SOFTWARE_DRIVER";
    }
    return SUCCESS;
}

int cuGetErrorString(int code, const char** text) {
    BEGIN
    switch (code) {
        case OUT_OF_MEMORY: *text = "out of memory"; break;
        case ILLEGAL_ADDRESS: *text = "an illegal memory access was encountered"; break;
        case LAUNCH_FAILED: *text = "unspecified launch failure"; break;
        default: *text = "an error of the software driver";
    }
    return SUCCESS;
}

static int device_count() { return atoi(software_setting("SOFTWARE_CUDA_DEVICES", "1").c_str()); }

int cuDeviceGetCount(int* count) {
    READY
    *count = device_count();
    return SUCCESS;
}

int cuDeviceGet(int* device, int ordinal) {
    READY
    *device = ordinal;
    return ordinal >= 0 && ordinal < device_count() ? SUCCESS : INVALID_DEVICE;
}

int cuDeviceGetName(char* name, int bytes, int device) {
    READY
    snprintf(name, bytes, "Software device %d", device);
    return SUCCESS;
}

int cuDeviceTotalMem_v2(size_t* bytes, int) {
    READY
    *bytes = device_bytes();
    return SUCCESS;
}

int cuDeviceGetAttribute(int* value, int attribute, int) {
    READY
    enum { MULTIPROCESSORS = 16, CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 };
    *value = attribute == CAPABILITY_MAJOR ? 9 : attribute == CAPABILITY_MINOR ? 0 : attribute == MULTIPROCESSORS ? 1 : 0;
    return SUCCESS;
}

int cuDevicePrimaryCtxRetain(void** context, int device) {
    READY
    retained++;
    *context = (void*)(intptr_t)(device + 1);
    return SUCCESS;
}

int cuDevicePrimaryCtxRelease_v2(int) {
    READY
    return retained-- > 0 ? SUCCESS : INVALID_CONTEXT;
}

int cuCtxSetCurrent(void* context) {
    READY
    current_context = context;
    return SUCCESS;
}

int cuCtxGetCurrent(void** context) {
    READY
    *context = current_context;
    return SUCCESS;
}

int cuMemGetInfo_v2(size_t* free_bytes, size_t* total) {
    IN_CONTEXT
    *total = device_bytes();
    *free_bytes = *total - allocated;
    return SUCCESS;
}

int cuMemAlloc_v2(Address* address, size_t bytes) {
    IN_CONTEXT
    if (!bytes) { return INVALID_VALUE; }
    if (bytes > device_bytes() - allocated) { return OUT_OF_MEMORY; }
    void* memory = nullptr;
    if (posix_memalign(&memory, 512, bytes)) { return OUT_OF_MEMORY; }
    memset(memory, 0xcd, bytes);
    device_memory[(Address)memory] = bytes;
    allocated += bytes;
    *address = (Address)memory;
    return SUCCESS;
}

int cuMemFree_v2(Address address) {
    IN_CONTEXT
    auto found = device_memory.find(address);
    if (found == device_memory.end()) { return INVALID_VALUE; }
    int code = drain_all();
    allocated -= found->second;
    device_memory.erase(found);
    free((void*)address);
    return code;
}

int cuMemHostAlloc(void** memory, size_t bytes, unsigned) {
    IN_CONTEXT
    if (posix_memalign(memory, 4096, bytes ? bytes : 1)) { return OUT_OF_MEMORY; }
    memset(*memory, 0xcd, bytes);
    pinned_memory[(Address)*memory] = bytes;
    return SUCCESS;
}

int cuMemFreeHost(void* memory) {
    IN_CONTEXT
    if (!pinned_memory.erase((Address)memory)) { return INVALID_VALUE; }
    int code = drain_all();
    free(memory);
    return code;
}

int cuMemcpyHtoDAsync_v2(Address to, const void* from, size_t bytes, void* stream) {
    IN_CONTEXT
    if (!is_inside(device_memory, to, bytes)) { return INVALID_VALUE; }
    if (is_inside(pinned_memory, (Address)from, bytes)) {
        return software_enqueue(stream, [=] { memcpy((void*)to, from, bytes); return 0; });
    }
    if (int code = refuse_in_capture(stream_of(stream))) { return code; }
    std::string copy((const char*)from, bytes);
    return software_enqueue(stream, [=] { memcpy((void*)to, copy.data(), bytes); return 0; });
}

int cuMemcpyDtoHAsync_v2(void* to, Address from, size_t bytes, void* stream) {
    IN_CONTEXT
    if (!is_inside(device_memory, from, bytes)) { return INVALID_VALUE; }
    if (!is_inside(pinned_memory, (Address)to, bytes)) {
        // Into ordinary memory the driver copies before it returns.
        if (int code = refuse_in_capture(stream_of(stream))) { return code; }
        int code = software_enqueue(stream, [=] { memcpy(to, (void*)from, bytes); return 0; });
        return code ? code : drain(stream_of(stream));
    }
    return software_enqueue(stream, [=] { memcpy(to, (void*)from, bytes); return 0; });
}

int cuMemcpyDtoDAsync_v2(Address to, Address from, size_t bytes, void* stream) {
    IN_CONTEXT
    if (!is_inside(device_memory, to, bytes) || !is_inside(device_memory, from, bytes)) { return INVALID_VALUE; }
    return software_enqueue(stream, [=] { memmove((void*)to, (void*)from, bytes); return 0; });
}

int cuMemsetD8Async(Address to, unsigned char value, size_t bytes, void* stream) {
    IN_CONTEXT
    if (!is_inside(device_memory, to, bytes)) { return INVALID_VALUE; }
    return software_enqueue(stream, [=] { memset((void*)to, value, bytes); return 0; });
}

int cuPointerGetAttribute(void* value, int attribute, Address address) {
    IN_CONTEXT
    enum { CONTEXT = 1, MEMORY_TYPE = 2, DEVICE_ORDINAL = 9, MEMORY_OF_DEVICE = 2, MEMORY_OF_HOST = 1 };
    const bool device = is_inside(device_memory, address, 0), pinned = is_inside(pinned_memory, address, 0);
    if (!device && !pinned) { return INVALID_VALUE; }
    if (attribute == MEMORY_TYPE) { *(unsigned*)value = device ? MEMORY_OF_DEVICE : MEMORY_OF_HOST; return SUCCESS; }
    if (attribute == DEVICE_ORDINAL) { *(int*)value = 0; return SUCCESS; }
    return INVALID_VALUE;
}

int cuStreamCreate(void** stream, unsigned) {
    IN_CONTEXT
    auto created = std::make_unique<Stream>();
    *stream = created.get();
    streams[created.get()] = std::move(created);
    return SUCCESS;
}

int cuStreamDestroy_v2(void* stream) {
    IN_CONTEXT
    if (is_default(stream) || !is_stream(stream)) { return INVALID_HANDLE; }
    int code = drain((Stream*)stream);
    streams.erase((Stream*)stream);
    return code;
}

int cuStreamSynchronize(void* stream) {
    IN_CONTEXT
    if (!is_stream(stream)) { return INVALID_HANDLE; }
    if (int code = refuse_in_capture(stream_of(stream))) { return code; }
    return drain(stream_of(stream));
}

int cuStreamWaitEvent(void* handle, void* waited, unsigned) {
    IN_CONTEXT
    if (!is_stream(handle)) { return INVALID_HANDLE; }
    auto is_done = ((Event*)waited)->is_done;
    Stream* recorded_in = ((Event*)waited)->stream;
    return software_enqueue(handle, [=] { return recorded_in ? drain(recorded_in, is_done.get()) : 0; });
}

int cuEventCreate(void** event, unsigned) {
    IN_CONTEXT
    *event = new Event;
    return SUCCESS;
}

int cuEventDestroy_v2(void* event) {
    IN_CONTEXT
    delete (Event*)event;
    return SUCCESS;
}

int cuEventRecord(void* handle, void* stream) {
    IN_CONTEXT
    if (!is_stream(stream)) { return INVALID_HANDLE; }
    auto* event = (Event*)handle;
    auto is_done = event->is_done = std::make_shared<bool>(false);
    auto time = event->time = std::make_shared<double>(0.0);
    event->stream = stream_of(stream);
    return software_enqueue(stream, [=] { *is_done = true; *time = now(); return 0; });
}

int cuEventSynchronize(void* handle) {
    IN_CONTEXT
    auto* event = (Event*)handle;
    if (!event->stream) { return SUCCESS; }
    if (int code = refuse_in_capture(event->stream)) { return code; }
    return drain(event->stream, event->is_done.get());
}

int cuEventQuery(void* handle) {
    IN_CONTEXT
    return *((Event*)handle)->is_done ? SUCCESS : NOT_READY;
}

int cuEventElapsedTime_v2(float* milliseconds, void* start, void* end) {
    IN_CONTEXT
    if (!*((Event*)start)->is_done || !*((Event*)end)->is_done) { return NOT_READY; }
    *milliseconds = (float)(*((Event*)end)->time - *((Event*)start)->time);
    return SUCCESS;
}

// An image is a number that marks it, the number of its bytes, a checksum, and a shared library.
static const uint64_t IMAGE_MARK = 0x45474d4946545753;

int cuModuleLoadData(void** handle, const void* image) {
    IN_CONTEXT
    uint64_t head[3];
    memcpy(head, image, sizeof head);
    if (head[0] != IMAGE_MARK) { return INVALID_IMAGE; }
    const char* bytes = (const char*)image + sizeof head;
    uint64_t sum = 0xcbf29ce484222325;
    for (uint64_t k = 0; k < head[1]; k++) { sum = (sum ^ (unsigned char)bytes[k]) * 0x100000001b3; }
    if (sum != head[2]) { return INVALID_IMAGE; }
    void* library = nullptr;
    std::vector<std::string> paths;
    while (!library) {
        // A library has a file of its own, because the system opens each file once.
        const char* folder = getenv("TMPDIR");
        std::string path = std::string(folder ? folder : "/tmp") + "/software-cuda-XXXXXX";
        int file = mkstemp(path.data());
        if (file < 0) { break; }
        paths.push_back(path);
        bool is_written = write(file, bytes, head[1]) == (ssize_t)head[1];
        if (close(file) || !is_written) { break; }
        library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!library) {
            fprintf(stderr, "%s\n", dlerror());
            break;
        }
        // The system knows a file by the number of its inode. It returns an earlier library where the file system gives
        // the number of a removed file away again, and the next file has another number.
        link_map* loaded = nullptr;
        if (dlinfo(library, RTLD_DI_LINKMAP, &loaded) == 0 && loaded->l_name != path && paths.size() < 64) {
            dlclose(library);
            library = nullptr;
        }
    }
    for (const std::string& path : paths) { unlink(path.c_str()); }
    if (!library) { return INVALID_IMAGE; }
    *handle = new Module{library, {}};
    return SUCCESS;
}

int cuModuleUnload(void* handle) {
    IN_CONTEXT
    int code = drain_all();
    dlclose(((Module*)handle)->library);
    delete (Module*)handle;
    return code;
}

int cuModuleGetFunction(void** function, void* handle, const char* name) {
    IN_CONTEXT
    auto* module = (Module*)handle;
    auto symbol = [&](const char* prefix) { return dlsym(module->library, (prefix + std::string(name)).c_str()); };
    auto run = (void (*)(void* const*))symbol("run_");
    if (!run) {
        fprintf(stderr, "%s\n", dlerror());
        return NOT_FOUND;
    }
    auto kernel = new Kernel{run, *(unsigned*)symbol("waits_") != 0, *(unsigned*)symbol("arguments_")};
    module->kernels.emplace_back(kernel);
    *function = kernel;
    return SUCCESS;
}

int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned, void* stream, void** parameters, void**) {
    IN_CONTEXT
    if (!gx || !gy || !gz || gy > 65535 || gz > 65535 || !bx || bx > 1024 || by != 1 || bz != 1) { return INVALID_VALUE; }
    Kernel kernel = *(Kernel*)function;
    std::vector<void*> arguments;
    for (unsigned k = 0; k < kernel.arguments; k++) { arguments.push_back(*(void**)parameters[k]); }
    return software_enqueue(stream, [=]() -> int {
        for (void* argument : arguments) {
            if (!is_inside(device_memory, (Address)argument, 4)) { return ILLEGAL_ADDRESS; }
        }
        const unsigned grid[3] = {gx, gy, gz};
        return run_kernel(kernel, grid, bx, arguments.data()) ? SUCCESS : LAUNCH_FAILED;
    });
}

int cuStreamBeginCapture_v2(void* handle, int) {
    IN_CONTEXT
    if (is_default(handle) || !is_stream(handle)) { return CAPTURE_UNSUPPORTED; }
    auto* stream = (Stream*)handle;
    if (stream->captured) { return INVALID_VALUE; }
    stream->captured = std::make_unique<std::vector<Work>>();
    stream->is_invalid = false;
    return SUCCESS;
}

int cuStreamEndCapture(void* handle, void** graph) {
    IN_CONTEXT
    auto* stream = stream_of(handle);
    *graph = nullptr;
    if (!stream->captured) { return INVALID_VALUE; }
    auto captured = std::move(stream->captured);
    if (stream->is_invalid) { return CAPTURE_INVALIDATED; }
    *graph = new Graph{std::move(*captured)};
    return SUCCESS;
}

int cuGraphGetNodes(void* graph, void**, size_t* count) {
    IN_CONTEXT
    *count = ((Graph*)graph)->nodes.size();
    return SUCCESS;
}

int cuGraphInstantiateWithFlags(void** executable, void* graph, unsigned long long) {
    IN_CONTEXT
    *executable = new Graph(*(Graph*)graph);
    return SUCCESS;
}

int cuGraphLaunch(void* executable, void* stream) {
    IN_CONTEXT
    for (const Work& node : ((Graph*)executable)->nodes) {
        if (int code = software_enqueue(stream, node)) { return code; }
    }
    return SUCCESS;
}

int cuGraphDestroy(void* graph) {
    READY
    delete (Graph*)graph;
    return SUCCESS;
}

int cuGraphExecDestroy(void* executable) {
    READY
    drain_all();
    delete (Graph*)executable;
    return SUCCESS;
}

}  // extern "C"
