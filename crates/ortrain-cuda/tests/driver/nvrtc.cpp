// NVRTC as a library that calls the C++ compiler. An image is a shared library, with a head that the driver checks.
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <atomic>
#include <fstream>
#include <iterator>
#include <string>

enum Result { SUCCESS = 0, INVALID_OPTION = 5, COMPILATION = 6, NO_SUCH_RESULT = 7 };
struct Program { std::string source, log, image; };

// The driver counts calls, if it is loaded.
static int call_begins(const char* function) {
    static auto begins = (int (*)(const char*))dlsym(RTLD_DEFAULT, "software_call_begins");
    if (!begins) {
        void* driver = dlopen("libcuda.so", RTLD_NOW | RTLD_NOLOAD);
        begins = driver ? (int (*)(const char*))dlsym(driver, "software_call_begins") : nullptr;
    }
    return begins ? begins(function) : 0;
}
#define BEGIN                                                \
    if (int code = call_begins(__func__)) { return code; }

static uint64_t hash_of(const std::string& text, uint64_t hash) {
    for (unsigned char byte : text) { hash = (hash ^ byte) * 0x100000001b3; }
    return hash;
}

static std::string read_file(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
}

static std::string folder_of_this_library() {
    Dl_info info;
    dladdr((void*)folder_of_this_library, &info);
    std::string path = info.dli_fname;
    return path.substr(0, path.rfind('/'));
}

// Leaves out a barrier of each kernel, if the environment says which: a mutant for tests.
static std::string without_barrier(std::string source) {
    const char* number = getenv("SOFTWARE_NVRTC_DROP_BARRIER");
    if (!number || !*number) { return source; }
    const std::string head = "__global__", barrier = "__syncthreads();";
    for (size_t kernel = source.find(head); kernel != std::string::npos; kernel = source.find(head, kernel + 1)) {
        size_t end = source.find(head, kernel + 1), at = source.find(barrier, kernel);
        for (int k = atoi(number); k > 0 && at != std::string::npos; k--) { at = source.find(barrier, at + 1); }
        if (at != std::string::npos && (end == std::string::npos || at < end)) {
            source.replace(at, barrier.size(), barrier.size(), ' ');
        }
    }
    return source;
}

// The source, with what a module exports for each of its kernels.
static std::string as_cpp(const std::string& given) {
    const std::string source = without_barrier(given);
    std::string text = source + "\n";
    const std::string mark = "__global__ void ";
    for (size_t at = source.find(mark); at != std::string::npos;) {
        size_t next = source.find(mark, at + 1), open = source.find('(', at);
        if (source.compare(at + mark.size(), 17, "__launch_bounds__") == 0) { open = source.find('(', open + 1); }
        size_t start = source.find_last_of(" ", open) + 1;
        std::string name = source.substr(start, open - start);
        bool waits = source.substr(at, next == std::string::npos ? next : next - at).find("__syncthreads") != std::string::npos;
        text += "SOFTWARE_KERNEL(" + name + ", " + (waits ? "1" : "0") + ")\n";
        at = next;
    }
    return text;
}

static const char* FLAGS = "-std=c++17 -O1 -w -fPIC -shared -nostdlib -ffp-contract=off -fno-exceptions -fno-rtti";

extern "C" {

int nvrtcVersion(int* major, int* minor) {
    BEGIN
    const char* text = getenv("SOFTWARE_NVRTC_VERSION");
    int version = text ? atoi(text) : 13000;
    *major = version / 1000;
    *minor = version % 1000 / 10;
    return SUCCESS;
}

int nvrtcCreateProgram(void** program, const char* source, const char*, int, const char* const*, const char* const*) {
    BEGIN
    *program = new Program{source, "", ""};
    return SUCCESS;
}

int nvrtcDestroyProgram(void** program) {
    BEGIN
    delete (Program*)*program;
    *program = nullptr;
    return SUCCESS;
}

int nvrtcCompileProgram(void* handle, int count, const char* const* options) {
    BEGIN
    for (int k = 0; k < count; k++) {
        if (strncmp(options[k], "--gpu-architecture=sm_", 22) && strncmp(options[k], "--ptxas-options=", 16)) { return INVALID_OPTION; }
    }
    auto* program = (Program*)handle;
    std::string own = folder_of_this_library();
    std::string header = read_file(own + "/cuda_language.h"), text = as_cpp(program->source);
    const char* cache = getenv("SOFTWARE_NVRTC_CACHE");
    char name[40];
    uint64_t first = hash_of(FLAGS, hash_of(header, hash_of(text, 0xcbf29ce484222325)));
    snprintf(name, sizeof name, "/%016llx%016llx.so", (unsigned long long)first, (unsigned long long)hash_of(text, first));
    std::string stored = cache ? cache + std::string(name) : "", library = cache ? read_file(stored) : "";
    if (library.empty()) {
        static std::atomic<unsigned> number{0};
        const char* temporary = getenv("TMPDIR");
        std::string base = std::string(temporary ? temporary : "/tmp") + "/software-nvrtc-" + std::to_string(getpid()) + "-" + std::to_string(number++);
        std::ofstream unit(base + ".cpp");
        unit << "#include \"" << own << "/cuda_language.h\"\n" << text;
        unit.close();
        if (!unit) {
            program->log = "cannot write " + base + ".cpp";
            return COMPILATION;
        }
        std::string command = std::string("g++ ") + FLAGS + " " + base + ".cpp " + own + "/libcuda.so.1 -o " + base + ".so 2> " + base + ".log";
        int code = system(command.c_str());
        library = code ? "" : read_file(base + ".so");
        program->log = read_file(base + ".log");
        if (code == 0 && cache) { rename((base + ".so").c_str(), stored.c_str()); }
        for (const char* end : {".cpp", ".so", ".log"}) { unlink((base + end).c_str()); }
        if (code) { return COMPILATION; }
    }
    uint64_t head[3] = {0x45474d4946545753, library.size(), hash_of(library, 0xcbf29ce484222325)};
    program->image = std::string((const char*)head, sizeof head) + library;
    return SUCCESS;
}

int nvrtcGetProgramLogSize(void* program, size_t* bytes) {
    BEGIN
    *bytes = ((Program*)program)->log.size() + 1;
    return SUCCESS;
}

int nvrtcGetProgramLog(void* program, char* log) {
    BEGIN
    strcpy(log, ((Program*)program)->log.c_str());
    return SUCCESS;
}

int nvrtcGetCUBINSize(void* program, size_t* bytes) {
    BEGIN
    *bytes = ((Program*)program)->image.size();
    return SUCCESS;
}

int nvrtcGetCUBIN(void* program, char* image) {
    BEGIN
    const std::string& bytes = ((Program*)program)->image;
    if (bytes.empty()) { return NO_SUCH_RESULT; }
    memcpy(image, bytes.data(), bytes.size());
    return SUCCESS;
}

const char* nvrtcGetErrorString(int code) {
    return code == COMPILATION ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR";
}

}  // extern "C"
