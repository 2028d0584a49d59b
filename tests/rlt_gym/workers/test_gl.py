"""EGL where it works, OSMesa elsewhere, on the device of the CUDA number."""

import ctypes

from rlt_gym.workers import gl


class FakeEGL:
    """libEGL with devices whose CUDA numbers are given; None: a device without one, as Mesa's."""

    def __init__(self, cuda_of_egl):
        @ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int))
        def devices(size, handles, count):
            for index in range(len(cuda_of_egl)):
                handles[index] = 1000 + index
            count[0] = len(cuda_of_egl)
            return 1

        @ctypes.CFUNCTYPE(ctypes.c_uint, ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_ssize_t))
        def attribute(device, name, value):
            cuda = cuda_of_egl[device - 1000]
            if name != 0x323A or cuda is None:
                return 0
            value[0] = cuda
            return 1

        self._functions = {b"eglQueryDevicesEXT": devices, b"eglQueryDeviceAttribEXT": attribute}

        class GetProcAddress:
            restype = None

            def __call__(_, name):
                return ctypes.cast(self._functions[name], ctypes.c_void_p).value

        self.eglGetProcAddress = GetProcAddress()


def test_cuda_numbers_are_mapped_to_egl_devices():
    order = [2, None, 0, 1]
    assert gl.query_cuda_indices(FakeEGL(order)) == order
    assert [gl.egl_index(cuda, order) for cuda in range(4)] == [2, 3, 0, None]
    assert gl.cuda_index({}) == 0 and gl.cuda_index({"CUDA_VISIBLE_DEVICES": "3,1"}) == 3
    assert gl.cuda_index({"CUDA_VISIBLE_DEVICES": "GPU-1234"}) == 0


def test_egl_where_it_works_else_osmesa_with_one_warning(monkeypatch, caplog):
    asked = []

    def try_egl(python, cuda):
        asked.append(cuda)
        return {"ok": cuda == 2, "device": 5, "error": "no driver"}

    monkeypatch.setattr(gl, "try_egl", try_egl)
    gl.say_no_egl.cache_clear()
    good = gl.choose_gl({"MUJOCO_GL": "egl", "CUDA_VISIBLE_DEVICES": "2"})
    assert good == gl.GLChoice("egl", 5)
    assert good.environment() == {"MUJOCO_GL": "egl", "PYOPENGL_PLATFORM": "egl", "MUJOCO_EGL_DEVICE_ID": "5"}
    assert gl.choose_gl({"MUJOCO_GL": "egl", "CUDA_VISIBLE_DEVICES": "2", "MUJOCO_EGL_DEVICE_ID": "1"}).egl_device == 1
    assert not caplog.records
    for _ in range(3):
        assert gl.choose_gl({"MUJOCO_GL": "egl"}) == gl.GLChoice("osmesa")
    assert len(caplog.records) == 1 and "no driver" in caplog.text
    assert gl.choose_gl({"MUJOCO_GL": "osmesa"}) == gl.GLChoice("osmesa")
    assert asked == [2, 2, 0, 0, 0]
