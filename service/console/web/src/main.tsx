// The console begins here.
import { QueryClientProvider } from '@tanstack/react-query'
import { RouterProvider } from '@tanstack/react-router'
import { StrictMode } from 'react'
import { createRoot } from 'react-dom/client'
import { client } from './api/queries'
import { applyTheme, storedTheme } from './theme'
import { router } from './router'
import './style/tokens.css'
import './style/base.css'
import './style/parts.css'

applyTheme(storedTheme())
createRoot(document.getElementById('root')!).render(
  <StrictMode>
    <QueryClientProvider client={client}>
      <RouterProvider router={router} />
    </QueryClientProvider>
  </StrictMode>,
)
