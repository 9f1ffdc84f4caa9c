// cuBLASLt as a library that computes on the processor: column-major products with scaling, a bias, and batches. Work
// goes to the streams of the driver.
#include <string.h>
#include <map>
#include <memory>
#include <vector>
#include "software.h"

enum Status { SUCCESS = 0, NOT_INITIALIZED = 1, INVALID_VALUE = 7, INTERNAL_ERROR = 14, NOT_SUPPORTED = 15 };
enum { R_32F = 0, R_64F = 1, COMPUTE_32F = 68, COMPUTE_64F = 70, EPILOGUE_BIAS = 4 };
enum { DESC_TRANSA = 3, DESC_TRANSB = 4, DESC_EPILOGUE = 7, DESC_BIAS_POINTER = 8 };
enum { LAYOUT_BATCH_COUNT = 5, LAYOUT_BATCH_OFFSET = 6 };
enum { PREF_MAX_WORKSPACE = 1, PREF_REDUCTION_MASK = 3 };

struct Attributes {
    std::map<int, long long> values;
    long long get(int key, long long otherwise) const {
        auto found = values.find(key);
        return found == values.end() ? otherwise : found->second;
    }
    int set(int key, const void* value, size_t bytes) {
        if (bytes == 4) {
            int number;
            memcpy(&number, value, 4);
            values[key] = number;
        } else if (bytes == 8) {
            memcpy(&values[key], value, 8);
        } else {
            return INVALID_VALUE;
        }
        return SUCCESS;
    }
};
struct Description : Attributes { int compute, scale; };
struct Layout : Attributes { int type; size_t rows, columns; long long leading; };
struct Algorithm { unsigned long long mark; unsigned long long rest[7]; };
struct Heuristic { Algorithm algorithm; size_t workspace; int state; float waves; int reserved[4]; };
static const unsigned long long MARK = 0x6d68746972676c61;
static const size_t WORKSPACE = 4096;

template <class T>
static void multiply(const Description& desc, const Layout& a, const Layout& b, const Layout& d, const T* A, const T* B,
                     T* D, T alpha, T beta, const T* bias) {
    const bool ta = desc.get(DESC_TRANSA, 0), tb = desc.get(DESC_TRANSB, 0);
    const size_t inner = ta ? a.rows : a.columns;
    for (long long k = 0; k < d.get(LAYOUT_BATCH_COUNT, 1); k++) {
        const T* x = A + k * a.get(LAYOUT_BATCH_OFFSET, 0);
        const T* y = B + k * b.get(LAYOUT_BATCH_OFFSET, 0);
        T* z = D + k * d.get(LAYOUT_BATCH_OFFSET, 0);
        for (size_t j = 0; j < d.columns; j++) {
            for (size_t i = 0; i < d.rows; i++) {
                T sum = 0;
                for (size_t l = 0; l < inner; l++) {
                    sum += x[ta ? l + i * a.leading : i + l * a.leading] * y[tb ? j + l * b.leading : l + j * b.leading];
                }
                T& to = z[i + j * d.leading];
                to = alpha * sum + (beta == 0 ? T(0) : beta * to) + (bias ? bias[i] : T(0));
            }
        }
    }
}

static size_t bytes_of(const Layout& layout, size_t element) {
    long long last = (layout.columns - 1) * layout.leading + layout.rows;
    last += (layout.get(LAYOUT_BATCH_COUNT, 1) - 1) * layout.get(LAYOUT_BATCH_OFFSET, 0);
    return last * element;
}

#define BEGIN                                                        \
    if (int code = software_call_begins(__func__)) { return code; }

extern "C" {

int cublasLtCreate(void** handle) {
    BEGIN
    *handle = new int(0);
    return SUCCESS;
}

int cublasLtDestroy(void* handle) {
    BEGIN
    delete (int*)handle;
    return SUCCESS;
}

int cublasLtMatmulDescCreate(void** description, int compute, int scale) {
    BEGIN
    *description = new Description{{}, compute, scale};
    return SUCCESS;
}

int cublasLtMatmulDescDestroy(void* description) {
    BEGIN
    delete (Description*)description;
    return SUCCESS;
}

int cublasLtMatmulDescSetAttribute(void* description, int key, const void* value, size_t bytes) {
    BEGIN
    return ((Description*)description)->set(key, value, bytes);
}

int cublasLtMatrixLayoutCreate(void** layout, int type, unsigned long long rows, unsigned long long columns, long long leading) {
    BEGIN
    if (!rows || !columns || leading < (long long)rows) { return INVALID_VALUE; }
    *layout = new Layout{{}, type, rows, columns, leading};
    return SUCCESS;
}

int cublasLtMatrixLayoutDestroy(void* layout) {
    BEGIN
    delete (Layout*)layout;
    return SUCCESS;
}

int cublasLtMatrixLayoutSetAttribute(void* layout, int key, const void* value, size_t bytes) {
    BEGIN
    return ((Layout*)layout)->set(key, value, bytes);
}

int cublasLtMatmulPreferenceCreate(void** preference) {
    BEGIN
    *preference = new Attributes;
    return SUCCESS;
}

int cublasLtMatmulPreferenceDestroy(void* preference) {
    BEGIN
    delete (Attributes*)preference;
    return SUCCESS;
}

int cublasLtMatmulPreferenceSetAttribute(void* preference, int key, const void* value, size_t bytes) {
    BEGIN
    return ((Attributes*)preference)->set(key, value, bytes);
}

static int check(const Description& desc, const Layout& a, const Layout& b, const Layout& d) {
    const bool single = desc.compute == COMPUTE_32F && desc.scale == R_32F;
    if (!single && !(desc.compute == COMPUTE_64F && desc.scale == R_64F)) { return NOT_SUPPORTED; }
    if (a.type != desc.scale || b.type != desc.scale || d.type != desc.scale) { return NOT_SUPPORTED; }
    if (!single && desc.get(DESC_EPILOGUE, 1) == EPILOGUE_BIAS) { return NOT_SUPPORTED; }
    const bool ta = desc.get(DESC_TRANSA, 0), tb = desc.get(DESC_TRANSB, 0);
    const size_t rows = ta ? a.columns : a.rows, inner = ta ? a.rows : a.columns;
    if (rows != d.rows || inner != (tb ? b.columns : b.rows) || d.columns != (tb ? b.rows : b.columns)) { return INVALID_VALUE; }
    return SUCCESS;
}

int cublasLtMatmulAlgoGetHeuristic(void*, void* desc, void* a, void* b, void*, void* d, void* preference, int requested,
                                   void* results, int* count) {
    BEGIN
    // The library asks the driver for properties that a capture forbids.
    if (software_is_capturing()) { return INTERNAL_ERROR; }
    *count = 0;
    if (int code = check(*(Description*)desc, *(Layout*)a, *(Layout*)b, *(Layout*)d)) { return code; }
    auto* settings = (Attributes*)preference;
    if (settings->get(PREF_REDUCTION_MASK, -1) != 0 || settings->get(PREF_MAX_WORKSPACE, 0) < (long long)WORKSPACE) { return SUCCESS; }
    if (requested > 0) {
        auto* result = (Heuristic*)results;
        *result = Heuristic{{MARK, {}}, WORKSPACE, SUCCESS, 1.0f, {}};
        *count = 1;
    }
    return SUCCESS;
}

int cublasLtMatmul(void* handle, void* desc, const void* alpha, const void* A, void* a, const void* B, void* b,
                   const void* beta, const void* C, void* c, void* D, void* d, const void* algorithm, void* workspace,
                   size_t workspace_bytes, void* stream) {
    BEGIN
    if (!handle) { return NOT_INITIALIZED; }
    Description description = *(Description*)desc;
    Layout la = *(Layout*)a, lb = *(Layout*)b, ld = *(Layout*)d;
    if (int code = check(description, la, lb, ld)) { return code; }
    if (C != D || c != d || ((const Algorithm*)algorithm)->mark != MARK || workspace_bytes < WORKSPACE) { return INVALID_VALUE; }
    const bool single = description.scale == R_32F;
    const size_t element = single ? 4 : 8;
    double first, second;
    if (single) {
        first = *(const float*)alpha;
        second = *(const float*)beta;
    } else {
        first = *(const double*)alpha;
        second = *(const double*)beta;
    }
    const void* bias = description.get(DESC_EPILOGUE, 1) == EPILOGUE_BIAS ? (const void*)description.get(DESC_BIAS_POINTER, 0) : nullptr;
    return software_enqueue(stream, [=]() -> int {
        const int ILLEGAL_ADDRESS = 700;
        const bool valid = software_is_allocated(A, bytes_of(la, element)) && software_is_allocated(B, bytes_of(lb, element)) &&
                           software_is_allocated(D, bytes_of(ld, element)) && software_is_allocated(workspace, WORKSPACE) &&
                           (!bias || software_is_allocated(bias, ld.rows * element));
        if (!valid) { return ILLEGAL_ADDRESS; }
        memset(workspace, 0xcd, WORKSPACE);
        if (single) {
            multiply<float>(description, la, lb, ld, (const float*)A, (const float*)B, (float*)D, (float)first, (float)second, (const float*)bias);
        } else {
            multiply<double>(description, la, lb, ld, (const double*)A, (const double*)B, (double*)D, first, second, (const double*)bias);
        }
        return 0;
    }) ? INTERNAL_ERROR : SUCCESS;
}

size_t cublasLtGetVersion() { return 130000; }

}  // extern "C"
