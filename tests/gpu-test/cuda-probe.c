/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs one CUDA kernel on the only visible GPU, and verifies every result.
 *
 * No CUDA toolkit: libcuda is loaded with dlopen, as a container's program
 * does, and the kernel is PTX text that the driver compiles. Prints lines
 * "cuda KEY VALUE"; times are in microseconds. Exits with 0, or with a line
 * "cuda error ..." and 1.
 */
#include <dlfcn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

enum { COUNT = 1 << 20, BLOCK = 256, LAUNCHES = 100 };

static const char KERNEL[] =
	".version 6.0\n"
	".target sm_50\n"
	".address_size 64\n"
	".visible .entry add(.param .u64 to, .param .u64 left, .param .u64 right, .param .u32 count)\n"
	"{\n"
	"	.reg .pred %p<2>;\n"
	"	.reg .b32 %r<9>;\n"
	"	.reg .b64 %d<8>;\n"
	"	mov.u32 %r1, %ctaid.x;\n"
	"	mov.u32 %r2, %ntid.x;\n"
	"	mov.u32 %r3, %tid.x;\n"
	"	mad.lo.u32 %r4, %r1, %r2, %r3;\n"
	"	ld.param.u32 %r5, [count];\n"
	"	setp.ge.u32 %p1, %r4, %r5;\n"
	"	@%p1 bra END;\n"
	"	mul.wide.u32 %d1, %r4, 4;\n"
	"	ld.param.u64 %d2, [left];\n"
	"	cvta.to.global.u64 %d2, %d2;\n"
	"	add.u64 %d3, %d2, %d1;\n"
	"	ld.global.u32 %r6, [%d3];\n"
	"	ld.param.u64 %d4, [right];\n"
	"	cvta.to.global.u64 %d4, %d4;\n"
	"	add.u64 %d5, %d4, %d1;\n"
	"	ld.global.u32 %r7, [%d5];\n"
	"	add.u32 %r8, %r6, %r7;\n"
	"	ld.param.u64 %d6, [to];\n"
	"	cvta.to.global.u64 %d6, %d6;\n"
	"	add.u64 %d7, %d6, %d1;\n"
	"	st.global.u32 [%d7], %r8;\n"
	"END:\n"
	"	ret;\n"
	"}\n";

typedef int result;
typedef unsigned long long address;

static struct {
	result (*init)(unsigned int);
	result (*driver_version)(int *);
	result (*count)(int *);
	result (*get)(int *, int);
	result (*name)(char *, int, int);
	result (*pci)(char *, int, int);
	result (*retain)(void **, int);
	result (*current)(void *);
	result (*module)(void **, const void *);
	result (*function)(void **, void *, const char *);
	result (*alloc)(address *, size_t);
	result (*to_device)(address, const void *, size_t);
	result (*to_host)(void *, address, size_t);
	result (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
			 void **);
	result (*finish)(void);
	result (*free)(address);
	result (*release)(int);
	result (*error)(result, const char **);
} cuda;

/* Symbols of the CUDA driver API; "_v2" are the variants with 64-bit sizes. */
static const struct {
	const char *name;
	void *place;
} SYMBOLS[] = {
	{ "cuInit", &cuda.init },
	{ "cuDriverGetVersion", &cuda.driver_version },
	{ "cuDeviceGetCount", &cuda.count },
	{ "cuDeviceGet", &cuda.get },
	{ "cuDeviceGetName", &cuda.name },
	{ "cuDeviceGetPCIBusId", &cuda.pci },
	{ "cuDevicePrimaryCtxRetain", &cuda.retain },
	{ "cuCtxSetCurrent", &cuda.current },
	{ "cuModuleLoadData", &cuda.module },
	{ "cuModuleGetFunction", &cuda.function },
	{ "cuMemAlloc_v2", &cuda.alloc },
	{ "cuMemcpyHtoD_v2", &cuda.to_device },
	{ "cuMemcpyDtoH_v2", &cuda.to_host },
	{ "cuLaunchKernel", &cuda.launch },
	{ "cuCtxSynchronize", &cuda.finish },
	{ "cuMemFree_v2", &cuda.free },
	{ "cuDevicePrimaryCtxRelease_v2", &cuda.release },
	{ "cuGetErrorName", &cuda.error },
};

static void __attribute__((noreturn, format(printf, 1, 2))) fail(const char *format, ...)
{
	va_list values;

	printf("cuda error ");
	va_start(values, format);
	vprintf(format, values);
	va_end(values);
	printf("\n");
	exit(1);
}

static void must(result code, const char *what)
{
	const char *name = NULL;

	if (!code)
		return;
	if (cuda.error)
		cuda.error(code, &name);
	fail("%s: %d %s", what, code, name ? name : "");
}

static double now_us(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1e6 + time.tv_nsec / 1e3;
}

static double last;

/* Prints the time since the last call. */
static void say_time(const char *step)
{
	double now = now_us();

	printf("cuda us-%s %.1f\n", step, now - last);
	last = now_us();
}

static void load(void)
{
	void *library = dlopen("libcuda.so.1", RTLD_NOW);
	size_t at;

	if (!library)
		fail("failed to load libcuda.so.1: %s", dlerror());
	for (at = 0; at < sizeof(SYMBOLS) / sizeof(SYMBOLS[0]); at++) {
		void *symbol = dlsym(library, SYMBOLS[at].name);

		if (!symbol)
			fail("libcuda.so.1 has no %s", SYMBOLS[at].name);
		*(void **)SYMBOLS[at].place = symbol;
	}
}

int main(void)
{
	static uint32_t left[COUNT], right[COUNT], sum[COUNT];
	const size_t bytes = sizeof(sum);
	address d_left, d_right, d_sum;
	int number = 0, device = -1, version = 0, at;
	uint32_t count = COUNT, i;
	void *context, *module, *add;
	char text[256] = "";
	void *parameters[] = { &d_sum, &d_left, &d_right, &count };

	setvbuf(stdout, NULL, _IOLBF, 0);
	last = now_us();
	load();
	say_time("load");
	must(cuda.init(0), "cuInit");
	say_time("init");
	must(cuda.driver_version(&version), "cuDriverGetVersion");
	must(cuda.count(&number), "cuDeviceGetCount");
	printf("cuda version %d\ncuda devices %d\n", version, number);
	must(cuda.get(&device, 0), "cuDeviceGet");
	must(cuda.name(text, sizeof(text) - 1, device), "cuDeviceGetName");
	printf("cuda name %s\n", text);
	must(cuda.pci(text, sizeof(text) - 1, device), "cuDeviceGetPCIBusId");
	printf("cuda pci %s\n", text);

	last = now_us();
	must(cuda.retain(&context, device), "cuDevicePrimaryCtxRetain");
	must(cuda.current(context), "cuCtxSetCurrent");
	say_time("context");
	must(cuda.module(&module, KERNEL), "cuModuleLoadData");
	must(cuda.function(&add, module, "add"), "cuModuleGetFunction");
	say_time("compile");

	for (i = 0; i < COUNT; i++) {
		left[i] = i * 2654435761u;
		right[i] = ~i;
	}
	last = now_us();
	must(cuda.alloc(&d_left, bytes), "cuMemAlloc");
	must(cuda.alloc(&d_right, bytes), "cuMemAlloc");
	must(cuda.alloc(&d_sum, bytes), "cuMemAlloc");
	must(cuda.to_device(d_left, left, bytes), "cuMemcpyHtoD");
	must(cuda.to_device(d_right, right, bytes), "cuMemcpyHtoD");
	say_time("copy-in");
	must(cuda.launch(add, (COUNT + BLOCK - 1) / BLOCK, 1, 1, BLOCK, 1, 1, 0, NULL, parameters, NULL), "cuLaunchKernel");
	must(cuda.finish(), "cuCtxSynchronize");
	say_time("kernel-first");
	for (at = 0; at < LAUNCHES; at++) {
		must(cuda.launch(add, (COUNT + BLOCK - 1) / BLOCK, 1, 1, BLOCK, 1, 1, 0, NULL, parameters, NULL),
		     "cuLaunchKernel");
		must(cuda.finish(), "cuCtxSynchronize");
	}
	printf("cuda us-kernel %.2f\n", (now_us() - last) / LAUNCHES);
	last = now_us();
	must(cuda.to_host(sum, d_sum, bytes), "cuMemcpyDtoH");
	say_time("copy-out");
	for (i = 0; i < COUNT; i++)
		if (sum[i] != i * 2654435761u + ~i)
			fail("element %u is %u, not %u", i, sum[i], i * 2654435761u + ~i);
	printf("cuda verified %d\n", COUNT);

	last = now_us();
	must(cuda.free(d_sum), "cuMemFree");
	must(cuda.free(d_right), "cuMemFree");
	must(cuda.free(d_left), "cuMemFree");
	must(cuda.release(device), "cuDevicePrimaryCtxRelease");
	say_time("release");
	return 0;
}
