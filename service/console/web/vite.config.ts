// How the console is built and tested. The output lies beside the endpoints that serve it, in ../static/app.
import react from '@vitejs/plugin-react'
import { defineConfig } from 'vitest/config'

// Where `npm run dev` finds a service: LIVER_URL=http://127.0.0.1:8470 npm run dev
const service = process.env.LIVER_URL ?? 'http://127.0.0.1:8470'

export default defineConfig({
  plugins: [react()],
  build: {
    outDir: '../static/app',
    emptyOutDir: true,
    manifest: true,
    // The content security policy has no data: for scripts and fonts, and a small file more costs nothing.
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: 'es2022',
    reportCompressedSize: false,
  },
  worker: { format: 'es' },
  server: { proxy: Object.fromEntries(['/api', '/login', '/logout', '/healthz'].map(path => [path, service])) },
  test: {
    environment: 'jsdom',
    include: ['src/**/*.test.{ts,tsx}'],
    setupFiles: ['src/test_setup.ts'],
    testTimeout: 20_000,
    pool: 'threads',
    maxWorkers: 1,
    isolate: false,
  },
})
