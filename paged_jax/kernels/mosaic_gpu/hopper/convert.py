"""PTX that converts 8 bits to float16."""

# Converts four bytes ($2) to four float16 ($0, $1), exactly.
CONVERT = {
    "float8_e4m3fn": """{ .reg .b16 low, high; mov.b32 {low, high}, $2;
        cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }""",
    "float8_e5m2": "prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;",
    # A float16 whose high byte is 0x64 and whose low byte is u equals 1024 + u. So 0x6480 equals 1024 + 128.
    "int8": """{ .reg .b32 u, zero; xor.b32 u, $2, 0x80808080; mov.b32 zero, 0x64806480;
        prmt.b32 $0, u, 0x64646464, 0x4140; prmt.b32 $1, u, 0x64646464, 0x4342;
        sub.f16x2 $0, $0, zero; sub.f16x2 $1, $1, zero; }""",
}
